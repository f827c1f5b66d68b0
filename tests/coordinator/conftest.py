"""A small world: two rollout nodes, one training node; machines to drive by hand and coordinators on real sockets."""

import concurrent.futures
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import zmq

from tests.coordinator.raw import Stranger
from verl_mux.coordinator.bus import curve_keys as keys
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.link import ask
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator

POOLS = {
    "rollout": {"nodes": [{"name": "r0", "gpus": 8, "cpus": [0]}, {"name": "r1", "gpus": 8}]},
    "train": {"nodes": [{"name": "t0", "gpus": 4}]},
}
NODES = {"rollout": ["r0"], "train": ["t0"]}
HOLDER = Path(__file__).with_name("holder.py")
# Of this run alone: a coordinator of another run of these tests ends what carries the uid of its dead jobs.
HOLDERS_UID = f"a:{os.getpid()}"


@pytest.fixture
def make():
    """Configuration of the small world with some keys set."""
    return lambda **keys: make_config({"pools": POOLS, **keys})


@pytest.fixture(autouse=True)
def state_folder(tmp_path_factory, monkeypatch):
    """Where a coordinator that is not told where keeps its journal: never the user's own."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


class Lines:
    """An event log that keeps its lines."""

    def __init__(self):
        self.lines = []

    def log(self, event, duration_sec=None, extra=None, step=None, **keys):
        self.lines.append((event, duration_sec, extra, step))

    def of(self, event):
        return [line for line in self.lines if line[0] == event]


@pytest.fixture
def event_log():
    return Lines()


@pytest.fixture
def serve(make, event_log):
    """Starts coordinators that are stopped when the test ends."""
    started = []

    def start(journal=None, bind="tcp://127.0.0.1:0", key_directory=None, **keys):
        coordinator = Coordinator(make(**keys), journal, bind, event_log, key_directory)
        coordinator.start()
        started.append(coordinator)
        return coordinator

    yield start
    for coordinator in started:
        coordinator.stop()


@pytest.fixture
def join():
    """Connects jobs; each with a uid of its own, as if it were a process of its own."""
    clients = []

    def connect_one(coordinator, job, nodes=None, **keys):
        keys = {"uid": f"{job}:{os.getpid()}.{len(clients)}", "timeout": 60.0, **keys}
        address = coordinator if isinstance(coordinator, str) else coordinator.address
        clients.append(connect(address, job, nodes or NODES, **keys))
        return clients[-1]

    yield connect_one
    for client in clients:
        client.close()


@pytest.fixture
def say_over():
    """Says what a launcher says when the driver of a job has ended."""

    def say(coordinator, job, uid):
        own = keys.for_address(coordinator.address, None, keys.OPERATOR)
        return ask(coordinator.address, m.JobOver(job=job, uid=uid), 60.0, own)

    return say


@pytest.fixture
def eventually():
    """Waits until a condition holds; fails with what it was last."""

    def wait(condition, seconds=60.0):
        deadline = time.monotonic() + seconds
        while not (seen := condition()):
            assert time.monotonic() < deadline, f"still {seen!r} after {seconds} s"
            time.sleep(0.01)
        return seen

    return wait


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as executor:
        yield executor


@pytest.fixture
def hold():
    """Starts a job `a`, a process of its own, that holds r0; gives its process and its member's pid. Ends both after the test."""
    started = []

    def start(coordinator, membership="none"):
        command = [sys.executable, str(HOLDER), coordinator.address, membership]
        environment = {**os.environ, UID_VARIABLE: HOLDERS_UID}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        member = int(process.stdout.readline())
        started.append((process, psutil.Process(member) if member else None))
        return process, member

    yield start
    for process, member in started:
        process.kill()
        process.communicate()
        if member is not None and member.is_running():
            member.kill()


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def stranger(context):
    """Makes connections by hand."""
    made = []  # a socket that is not kept is closed

    def make(address, **keys):
        made.append(Stranger(context, address, **keys))
        return made[-1]

    return make
