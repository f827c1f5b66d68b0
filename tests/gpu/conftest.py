"""One module of engines at a time has the device; what its tests measured is recorded."""

import pytest

from tests.gpu import record


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many there are; a test without one is skipped."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.cuda.device_count()


@pytest.fixture(params=[1, 2], ids=["one GPU", "TP 2"])
def ranks(request, gpus) -> int:
    """Of an engine."""
    if request.param > gpus:
        pytest.skip("one GPU: tensor parallelism needs two")
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if not item.get_closest_marker("gpu"):
        record.drop()
    elif report.when == "call" or not report.passed:
        record.write(item.nodeid, report.outcome, report.duration)
    return report
