"""`examples/hosts/run.sh`: two real jobs on three hosts, as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e import tiny
from tests.hosts.conftest import EXAMPLE
from tests.hosts.faults import mapped_without_lease, two_holders
from tests.hosts.interfaces import Sync, copies, read, summary, weights_bytes

pytestmark = pytest.mark.hosts
ROOT = Path(__file__).parents[2]
STEPS, JOBS = 5, ("wide", "narrow")
_TASK = {"wide": "fibonacci", "narrow": "products"}
_LIMIT_S, _LIMIT_BYTES = 1200, 22 * 2**30
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
        _run(ROOT / "examples" / "hosts.yaml", directory)
    finally:
        recorder.kill()
        recorder.wait()
    assert time.monotonic() - began < _LIMIT_S
    return directory


def _run(file: Path, directory: Path) -> Path:
    command = ["bash", str(EXAMPLE / "run.sh"), str(directory), str(file)]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=2 * _LIMIT_S)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module", params=JOBS)
def alone(request, run, tmp_path_factory) -> tuple[str, Path]:
    """A job and the folder of its run by itself, on the same hosts."""
    folder = tmp_path_factory.mktemp("alone")
    file = folder / "hosts.yaml"
    text = (ROOT / "examples" / "hosts.yaml").read_text().replace("{here}", str(ROOT / "examples"))  # which every host sees
    spec = yaml.safe_load(text)
    file.write_text(yaml.safe_dump({**spec, "jobs": {request.param: spec["jobs"][request.param]}}))
    return request.param, _run(file, folder / "run")


def test_both_jobs_do_all_their_steps(run):
    for job in JOBS:
        assert [e["step"] for e in tiny.events(run, job) if e["event"] == "step"] == list(range(1, STEPS + 1))


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
    syncs = [Sync.of(e, tiny.ended(e), model) for e in tiny.events(run, job) if e["event"] == "sync"]
    found = copies(syncs, read(run.with_name(_COUNTERS)), leased["rollout"], leased["train"])
    told = summary(found)
    run.with_name(f"syncs_{job}.json").write_text(json.dumps({"summary": told, "syncs": found}, indent=2))
    print(job, json.dumps(told))
    assert len(found) == STEPS and told.keys() == {"copies", "over_sent"}
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


@pytest.mark.parametrize("key", ["reward", "loss"])
def test_each_step_is_as_if_the_job_were_alone(run, alone, key):
    job, by_itself = alone
    mine, expected = ([e["extra"][key] for e in tiny.events(d, job) if e["event"] == "step"] for d in (run, by_itself))
    assert len(expected) == STEPS and mine == expected


def test_both_fit_into_the_machine(run):
    assert 0 < json.loads((run / "summary.json").read_text())["mux"]["peak_rss_bytes"] <= _LIMIT_BYTES


def test_the_hosts_are_gone(run):
    assert not Path("/run/verl_mux_bed/mux.json").exists()
