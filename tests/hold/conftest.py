"""A coordinator as users start it, jobs beside it, and `verl-mux hold` in processes of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid

import psutil
import pytest

from bench.coordinator_process import CoordinatorProcess
from tests.coordinator.conftest import eventually  # noqa: F401
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.commands import fetch_status

CONFIG = {
    "pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}},
    "lease_timeout": 20,
}
NODES = {"rollout": ["r0"], "train": ["t0"]}


@pytest.fixture(autouse=True)
def no_mark(monkeypatch):
    """These tests may themselves run as part of a job."""
    monkeypatch.delenv(UID_VARIABLE, raising=False)


@pytest.fixture
def coordinator():
    with CoordinatorProcess(CONFIG) as running:
        yield running


@pytest.fixture
def job(coordinator):
    """A job that has not asked for anything yet."""
    mux = connect(coordinator.address, "job", NODES, uid="job:test", timeout=60.0)
    yield mux
    mux.close()


@pytest.fixture
def status(coordinator):
    return lambda: fetch_status(coordinator.address, 30.0)


@pytest.fixture
def holders(status):
    return lambda node="t0", pool="train": [h["job"] for h in status()["pools"][pool]["nodes"][node]["holders"]]


@pytest.fixture
def hold(coordinator, tmp_path):
    """Starts `verl-mux hold` with a script of Python as its command; whatever is left of all at the end is killed. `marked`: it
    need not start once more to carry its mark."""
    started = []

    def start(script, *options, pool="train", name="filler", marked=True):
        path = tmp_path / f"{name}.py"
        path.write_text(script)
        command = [sys.executable, "-m", "verl_mux", "hold", "--coordinator", coordinator.address, "--pool", pool, "--name", name]
        environment = {**os.environ, **({UID_VARIABLE: f"{name}:{uuid.uuid4().hex}"} if marked else {})}
        process = subprocess.Popen(
            [*command, *options, "--", sys.executable, str(path)], cwd=tmp_path, env=environment,
            stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(psutil.Error):
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
        process.wait()


@pytest.fixture
def pids(tmp_path, eventually):  # noqa: F811
    """The pids that a script wrote into a file, when they are all there."""
    left = []

    def read(name, number=1):
        path = tmp_path / name
        eventually(lambda: path.exists() and len(path.read_text().split()) >= number)
        found = [int(word) for word in path.read_text().split()]
        left.extend(found)
        return found

    yield read
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
