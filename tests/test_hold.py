"""A real `verl-mux hold` beside a real job: it fills what the job leaves, and is gone when the job wants it. Which nodes it may
hold, and what its command finds in the environment."""

# ruff: noqa: F811 (a fixture that is imported)

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from bench.coordinator_process import CoordinatorProcess
from tests.coordinator.conftest import eventually  # noqa: F401
from verl_mux import hold as hold_module
from verl_mux.coordinator.bus.client import Lease, LocalMux, connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.commands import fetch_status
from verl_mux.coordinator.core.settings import FILLER_GRACE_S
from verl_mux.errors import UserError
from verl_mux.places.place import Place

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
def pids(tmp_path, eventually):
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


# Says in a file that it runs, and resumes as a training script would: each start adds a line, the third one is through.
RESUMES = """
import os, pathlib, time
starts = pathlib.Path("starts")
number = len(starts.read_text().split()) if starts.exists() else 0
with starts.open("a") as lines:
    lines.write(f"{os.environ['VERL_MUX_LEASE_NODES']}\\n")
time.sleep(0 if number == 2 else 600)
"""
WAITS = "import os, time\nopen('pids', 'a').write(f'{os.getpid()}\\n')\ntime.sleep(600)\n"
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS
# A child in the group, and one that has left it for a session of its own; neither hears SIGTERM.
FAMILY = """
import os, subprocess, sys
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
for away in (False, True):
    child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=away)
    open("pids", "a").write(f"{child.pid}\\n")
"""


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def take(job, phase="train", step=1):
    """Asks as a job, and gives back at once. Returns the seconds that it waited."""
    lease = job.acquire(phase, step=step)
    job.release(lease)
    return lease.waited_s


def test_it_leaves_for_a_job_comes_back_and_ends_with_its_command(hold, job, tmp_path, eventually, holders):
    process = hold(RESUMES)
    for step in (1, 2):
        eventually(lambda step=step: (tmp_path / "starts").exists() and len((tmp_path / "starts").read_text().split()) == step)
        lease = job.acquire("train", step=step)
        assert lease.waited_s < FILLER_GRACE_S and holders() == ["job"]
        job.release(lease)
    assert process.wait(60) == 0
    assert (tmp_path / "starts").read_text().split() == ["t0", "t0", "t0"]
    assert holders() == []


def test_a_command_that_ignores_the_signal_is_killed_within_its_grace(hold, job, pids):
    hold(DEAF)
    (pid,) = pids("pids")
    assert take(job) < FILLER_GRACE_S
    assert not alive(pid)


def test_its_command_runs_below_the_jobs_processes_and_is_gone_with_grandchildren_before_the_job_has_the_node(hold, job, pids):
    hold(FAMILY + WAITS)
    family = pids("pids", 3)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in family} == {os.getpriority(os.PRIO_PROCESS, 0) + 10}
    assert take(job) < FILLER_GRACE_S
    assert not any(alive(pid) for pid in family)


def test_what_a_command_leaves_behind_when_it_ends_is_ended_too(hold, pids):
    process = hold(FAMILY)
    family = pids("pids", 2)
    assert process.wait(60) == 0
    assert not any(alive(pid) for pid in family)


@pytest.mark.parametrize(("script", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("", 0)])
def test_the_exit_code_of_a_command_that_ends_by_itself_is_passed_on(hold, script, code):
    assert hold(script).wait(60) == code


def test_an_interrupted_one_takes_its_command_along_and_gives_the_node_back(hold, pids, holders):
    process = hold(WAITS)
    (pid,) = pids("pids")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not alive(pid) and holders() == []


def test_one_that_waits_can_be_interrupted(hold, job, status, eventually):
    job.acquire("train", step=1)
    process = hold(WAITS)
    eventually(lambda: status()["jobs"].get("filler", {}).get("waiting"))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT


def test_one_that_was_killed_has_its_command_ended_by_the_coordinator(hold, job, pids):
    process = hold(WAITS)
    (pid,) = pids("pids")
    process.kill()
    job.release(job.acquire("train", step=1))
    assert not alive(pid)


def test_one_that_hangs_is_ended_with_its_command(hold, job, pids):
    process = hold(DEAF, marked=False)
    (pid,) = pids("pids")
    os.kill(process.pid, signal.SIGSTOP)
    assert take(job) < 60
    assert not alive(pid)
    assert process.wait(60) == -signal.SIGKILL


def test_a_job_that_comes_while_the_command_starts_waits_no_longer(hold, job, holders, eventually):
    """The command is a Python that has just been started, or not yet."""
    hold(DEAF)
    eventually(lambda: holders() == ["filler"])
    assert take(job) < FILLER_GRACE_S


def test_a_coordinator_that_was_killed_meanwhile_finds_the_filler_where_it_was(hold, job, coordinator, pids, holders, eventually):
    hold(WAITS)
    (pid,) = pids("pids")
    coordinator._process.kill()
    coordinator.stop()
    coordinator.start()
    assert holders() == ["filler"] and alive(pid)
    job.release(job.acquire("train", step=1))
    assert not alive(pid)
    eventually(lambda: holders() == ["filler"])


def test_without_a_coordinator_it_stops_before_its_lease_is_over(hold, coordinator, pids, eventually):
    hold(WAITS)
    (pid,) = pids("pids")
    coordinator.stop()
    stopped = time.monotonic()
    eventually(lambda: not alive(pid))
    assert time.monotonic() - stopped < 20  # the lease


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--grace", "10"], "at most 1.8 is allowed"),
        (["--nodes", "2"], "'train' has 1 nodes"),
        (["--timeout", "-1"], "--timeout is -1; a time above 0 s"),
        (["--grace", "nan"], "--grace is nan; a finite number"),
        (["--pool", "trian"], "no pool or node"),
    ],
)
def test_a_wrong_option_ends_in_one_line(hold, options, complaint):
    process = hold(WAITS, *options)
    said = process.communicate(timeout=60)[1].strip().splitlines()
    assert process.returncode == 2 and len(said) == 1 and complaint in said[0]


def test_a_command_that_cannot_be_run_ends_in_one_line(hold):
    process = hold(WAITS, "--", "/no/such/command")
    said = process.communicate(timeout=60)[1].strip().splitlines()
    assert process.returncode == 2 and "cannot be run" in said[-1]


# --- which nodes, and what the command knows of them ---


class Placed(LocalMux):
    """Nodes of which a coordinator would tell: host, GPU ids and cores by name."""

    def __init__(self, nodes):
        super().__init__("sums", {"train": list(nodes)}, filler=True)
        self.about = nodes

    def place(self, node):
        return Place(**self.about[node])


def lease(*nodes):
    return Lease(token=7, nodes=list(nodes), phase="train", step=0, waited_s=0.0, granted_at=0.0)


HERE = socket.gethostname()
PLACED = Placed(
    {
        "t0": {"host": "127.0.0.1", "gpu_ids": [0, 1], "cpus": [0]},
        "t1": {"host": "127.0.0.1", "gpu_ids": [2, 3], "cpus": [1]},
        "t2": {"host": HERE},
        "t3": {"host": "host.invalid", "gpu_ids": [0, 1]},
        "t4": {},
    }
)


def test_it_holds_nodes_of_its_own_host_and_those_without_a_host():
    assert hold_module.reachable(PLACED, "train", 1) == ["t0", "t1", "t2", "t4"]


@pytest.mark.parametrize("number", [0, 5])
def test_more_nodes_than_there_are_are_refused_with_where_they_are(number):
    with pytest.raises(UserError, match=rf"--nodes is {number}.*4 nodes on.*t3 on host.invalid"):
        hold_module.reachable(PLACED, "train", number)


def test_gpus_of_one_host_are_made_the_visible_ones():
    noted = hold_module.environment(PLACED, lease("t0", "t1"))
    assert noted["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert (noted[hold_module.NODES], noted[hold_module.GPU_IDS], noted[hold_module.TOKEN]) == ("t0,t1", "0,1;2,3", "7")
    assert hold_module.cpus(PLACED, lease("t0", "t1")) == [0, 1]


@pytest.mark.parametrize("nodes", [("t0", "t3"), ("t2",), ("t4",)], ids=["two hosts", "GPUs not named", "nothing named"])
def test_otherwise_the_visible_gpus_are_left_to_the_command(nodes):
    assert "CUDA_VISIBLE_DEVICES" not in hold_module.environment(PLACED, lease(*nodes))
    assert hold_module.cpus(PLACED, lease(*nodes)) is None
