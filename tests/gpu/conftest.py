"""One module of engines at a time has the device."""

import pytest


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many there are; a test without one is skipped, and one of engines whose processes NVML does not show fails."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.cuda.device_count()
