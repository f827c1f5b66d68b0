"""`examples/hosts/run.sh`: two real jobs in one Ray cluster over three hosts, as a person runs it; once more with a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests.e2e import tiny
from tests.hosts.conftest import EXAMPLE
from tests.hosts.faults import mapped_without_lease, two_holders
from tests.hosts.interfaces import Sync, copies, read, summary, weights_bytes
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.launcher.marked_process import read_note

pytestmark = pytest.mark.hosts
ROOT = Path(__file__).parents[2]
STEPS, JOBS = 5, ("wide", "narrow")
_TASK = {"wide": "fibonacci", "narrow": "products"}
_LIMIT_S, _LIMIT_BYTES, _ENDED_S = 1200, 22 * 2**30, 30
# Of the hosts' interfaces, beside the run's folder.
_COUNTERS = "interfaces.jsonl"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Its folder, when it has ended well and in time."""
    sys.path.insert(0, str(EXAMPLE))
    from bed import BedError, require_root

    try:
        require_root()
    except BedError as error:
        pytest.skip(str(error))
    began, directory = time.monotonic(), tmp_path_factory.mktemp("hosts") / "run"
    recorder = subprocess.Popen([sys.executable, "-m", "tests.hosts.interfaces", directory.with_name(_COUNTERS)], cwd=ROOT)
    try:
        _end(_start(directory), directory, 0)
    finally:
        recorder.kill()
        recorder.wait()
    assert time.monotonic() - began < _LIMIT_S
    return directory


def _start(directory: Path) -> subprocess.Popen:
    with directory.with_name("out").open("w") as out:
        command = ["bash", str(EXAMPLE / "run.sh"), str(directory)]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}, stdout=out, stderr=out)


def _end(running: subprocess.Popen, directory: Path, code: int) -> None:
    assert running.wait(_LIMIT_S) == code, directory.with_name("out").read_text()


@pytest.fixture(scope="module")
def killed(run, tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder of a run whose `narrow` was killed after a step, and what was left of that job half a minute later."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    running = _start(directory)
    until(lambda: running.poll() is not None or _steps(directory, "narrow"))
    uid = read_note(directory / "narrow").uid
    (driver,) = [it for it in _of_job(uid) if "verl.trainer.main_ppo" in it and "submitted" not in it]
    os.kill(int(driver.split()[0]), signal.SIGKILL)
    until(lambda: not _of_job(uid), _ENDED_S)
    left = _of_job(uid)
    _end(running, directory, 1)
    return directory, left


def until(condition: Callable[[], object], seconds: float = _LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)


def _of_job(uid: str) -> list[str]:
    """Pid and words of each process with the job's mark, on all hosts."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(UID_VARIABLE) == uid:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found


def _steps(directory: Path, job: str) -> list[dict]:
    return [e for e in tiny.events(directory, job) if e["event"] == "step"]


def test_both_jobs_do_all_their_steps(run):
    for job in JOBS:
        assert [e["step"] for e in _steps(run, job)] == list(range(1, STEPS + 1))


def test_every_rank_and_every_engine_of_the_wide_job_got_weights_at_each_step(run):
    for job, engines in (("wide", 2), ("narrow", 1)):
        syncs = [e["extra"] for e in tiny.events(run, job) if e["event"] == "sync"]
        assert [sync["version"] for sync in syncs] == list(range(STEPS))
        assert len(list((run / job / "events" / "server" / "step_1").glob("worker_*.jsonl"))) == engines


@pytest.mark.parametrize("job", JOBS)
def test_each_rollout_host_received_each_byte_of_a_sync_once(run, job):
    """By its interface's own counter, less what it counts beside a sync. What is no weights comes in bursts (Ray's messages, the
    other job's), so a single sync may have more of it; a second copy would be 2."""
    leased = json.loads((run / "summary.json").read_text())["hosts"][job]
    model = weights_bytes(run / "assets" / _TASK[job] / "model" / "model.safetensors")
    # The first weights come before the first lease, and so before the event of their sync.
    syncs = [Sync.of(e, tiny.ended(e), model) for e in tiny.events(run, job) if e["event"] == "sync" and e["extra"]["version"]]
    found = copies(syncs, read(run.with_name(_COUNTERS)), leased["rollout"], leased["train"])
    told = summary(found)
    run.with_name(f"syncs_{job}.json").write_text(json.dumps({"summary": told, "syncs": found}, indent=2))
    print(job, json.dumps(told))
    assert len(found) == STEPS - 1 and told.keys() == {"copies", "over_sent"}
    for its in told.values():
        assert its["least_counted"] >= 1.0 and its["less_idle"] < 1.05 and its["most_less_idle"] < 1.5
        assert its["idle_share"] < 0.25  # more would hide a second copy


def test_no_two_jobs_hold_a_node_at_once(run):
    held: dict[str, list[tuple[float, float, str]]] = {}
    for job in JOBS:
        for event in (e for e in tiny.events(run, job) if e["event"] == "phase"):
            for node in event["extra"]["nodes"]:
                held.setdefault(node, []).append((tiny.ended(event) - event["duration_sec"], tiny.ended(event), job))
    assert held.keys() == {"r0", "r1", "t0", "t1"}
    for spans in held.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.001 or a[2] == b[2] for a, b in zip(spans, spans[1:], strict=False))


def test_the_agents_saw_each_job_where_its_leases_are_and_nowhere_else(run):
    spec = yaml.safe_load((ROOT / "examples" / "hosts.yaml").read_text())
    host_of = {node["name"]: node["host"] for pool in spec["coordinator"]["pools"].values() for node in pool["nodes"]}
    leased = {
        job: {side: sorted(host_of[node] for node in nodes) for side, nodes in keys["nodes"].items()}
        for job, keys in spec["jobs"].items()
    }
    assert json.loads((run / "summary.json").read_text())["hosts"] == leased
    assert two_holders(run) == [] and mapped_without_lease(run, run / "coordinator") == []


def test_each_step_is_as_if_the_other_job_were_not_there(run, killed):
    one, other = ([(e["extra"]["reward"], e["extra"]["loss"]) for e in _steps(it, "wide")] for it in (run, killed[0]))
    assert len(one) == STEPS and one == other
    assert len(_steps(killed[0], "narrow")) < STEPS


def test_nothing_is_left_of_a_killed_job(killed):
    assert killed[1] == []


def test_both_fit_into_the_machine(run):
    assert 0 < json.loads((run / "summary.json").read_text())["mux"]["peak_rss_bytes"] <= _LIMIT_BYTES


def test_the_hosts_are_gone(run):
    assert not Path("/run/verl_mux_bed/mux.json").exists()
