"""Jobs with hosts: a real launcher, coordinator, keepers and processes; verl's trainer and `ray start` are stand-ins, and the
host is this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.launcher.runs import FAKE, ROOT, Runs
from verl_mux.coordinator.bus.members import carriers
from verl_mux.coordinator.commands import fetch_status
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.launcher.host_parts import uid_on_hosts

FAKE_RAY = Path(__file__).with_name("fake_ray")
POOLS = {
    "rollout": {"nodes": [{"name": "r0", "host": "a", "gpu_ids": [3]}]},
    "train": {"nodes": [{"name": "t0", "host": "a", "gpu_ids": [0]}]},
}


def _write(runs: Runs, jobs: dict, **keys) -> None:
    environment = {"PYTHONPATH": f"{FAKE}:{FAKE_RAY}:{ROOT}", "TOLD": str(runs.out.parent / "noted")}
    given = {"coordinator": {"pools": POOLS}, "hosts": {"a": {"via": "local"}}, "bind": "127.0.0.1"}
    runs.write(jobs, **{**given, "environment": environment, **keys})


def _told(runs: Runs) -> list[dict]:
    return [json.loads(line) for line in (runs.out.parent / "noted").read_text().splitlines()]


def _left(runs: Runs, job: str) -> list:
    uid = runs.note(job).uid
    return [*carriers(uid), *carriers(uid_on_hosts(uid))]


def test_a_job_runs_in_a_ray_cluster_of_its_own_and_leaves_nothing(runs):
    _write(runs, {"a": {"overrides": ["+steps=3"]}}, clean_up=[["touch", str(runs.go)]])
    noted = runs.ends(launcher := runs.start())
    assert launcher.returncode == 0, noted
    assert runs.steps("a") == [1, 2, 3] and runs.summary()["jobs"]["a"]["steps"] == 3
    head, other = _told(runs)
    assert "--head" in head["words"] and '--resources={"mux_t0": 1}' in head["words"] and head["sees"] == "0"
    assert '--resources={"mux_r0": 1}' in other["words"] and other["sees"] == "3"
    address = next(word.removeprefix("--address=") for word in other["words"] if word.startswith("--address="))
    log = (runs.out / "a" / "job.log").read_text()
    assert f'"ray_kwargs.ray_init.address": "{address}"' in log
    assert not _left(runs, "a") and runs.go.exists()


def test_an_agent_is_kept_on_each_host_as_long_as_the_run_lasts(runs):
    _write(runs, {"a": {"overrides": [f"+until={runs.go}"]}})
    launcher = runs.start()
    runs.until(lambda: _agents(runs) == ["heard"])
    below = psutil.Process(runs.note("agent-a").pid).children(recursive=True)
    (agent,) = (process for process in below if "agent" in process.cmdline())
    agent.kill()
    runs.until(lambda: any("agent" in process.cmdline() for process in below[0].children() if process != agent))
    runs.until_step("a", 1)
    runs.go.touch()
    noted = runs.ends(launcher)
    assert launcher.returncode == 0, noted
    assert runs.summary()["hosts"] == {"a": {"rollout": [], "train": []}}, "no memory was held: verl is a stand-in"
    assert not any(process.is_running() for process in below)


def _agents(runs: Runs) -> list[str]:
    address = runs.out / "coordinator" / "address"
    if not address.exists():
        return []
    keys = runs.out / "coordinator" / "keys"
    return [host["agent"] for host in fetch_status(address.read_text().strip(), 30.0, keys)["hosts"].values()]


def test_no_secret_stands_in_a_command_line(runs):
    _write(runs, {"a": {"overrides": [f"+until={runs.go}"]}})
    launcher = runs.start()
    runs.until_step("a", 1)
    uid = uid_on_hosts(runs.note("a").uid)
    secret = (runs.out / "coordinator" / "keys" / "job.key_secret").read_text().split('secret-key = "')[1][:40]
    lines = list(_command_lines())
    assert lines and not any(text.encode() in line for line in lines for text in (uid, secret))
    runs.go.touch()
    runs.ends(launcher)


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield path.read_bytes()


def test_how_the_driver_ended_is_how_the_job_ended(runs):
    _write(runs, {"refuses": {"overrides": ["+refuse=true"]}, "dies": {"overrides": ["+die_in=2"]}})
    noted = runs.ends(launcher := runs.start())
    assert launcher.returncode == 1
    end = noted.strip().splitlines()[-1]
    assert "job refuses ended with exit code 2: unknown key mux.colour" in end and "job dies ended with exit code 137" in end
    assert not _left(runs, "refuses") and not _left(runs, "dies")


def test_a_second_run_takes_up_what_goes_on_on_the_hosts(runs):
    _write(runs, {"a": {"overrides": [f"+until={runs.go}"]}})
    first = runs.start()
    runs.until_step("a", 1)
    first.kill()
    first.wait()
    runs.until_step("a", runs.step("a") + 2)
    second = runs.start()
    assert any("job a runs (pid" in line for line in second.stderr)
    runs.until_step("a", runs.step("a") + 2)
    runs.go.touch()
    runs.ends(second)
    assert second.returncode == 0 and runs.steps("a") == list(range(1, runs.summary()["jobs"]["a"]["steps"] + 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_its_process_here_ends_so_does_the_job_on_its_hosts(runs, number):
    _write(runs, {"a": {"overrides": [f"+until={runs.go}"]}})
    launcher = runs.start()
    runs.until_step("a", 1)
    if number == signal.SIGINT:
        launcher.send_signal(number)
    else:
        os.kill(runs.note("a").pid, number)
    runs.ends(launcher)
    runs.until(lambda: not _left(runs, "a"))


def test_a_run_gives_its_jobs_to_a_coordinator_that_runs_already(runs, tmp_path):
    served = Coordinator(make_config({"pools": POOLS}))
    address = served.start()
    try:
        _write(runs, {"a": {"overrides": ["+steps=2"]}}, coordinator=address, bind=None)
        noted = runs.ends(launcher := runs.start())
        assert launcher.returncode == 0, noted
        assert runs.steps("a") == [1, 2] and served.snapshot()["jobs"]["a"]["steps_done"] == 2
    finally:
        served.stop()


def test_a_run_waits_for_who_was_submitted_to_its_coordinator(runs, tmp_path):
    _write(runs, {"a": {"overrides": [f"+until={runs.go}"]}})
    first = runs.start()
    runs.until_step("a", 1)
    later, given = Runs(tmp_path / "later"), yaml.safe_load(runs.file.read_text())
    later.file.parent.mkdir()
    given |= {
        "coordinator": (runs.out / "coordinator" / "address").read_text().strip(),
        "keys": str(runs.out / "coordinator" / "keys"),
    }
    guest = {"jobs": {"b": {**given["jobs"]["a"], "overrides": [f"+until={later.go}"]}}}
    later.file.write_text(yaml.safe_dump({**given, **guest, "dir": str(later.out), "bind": None}))
    second = later.start("--at", given["coordinator"])
    later.until_step("b", 1)
    runs.go.touch()
    noted = ""
    while "waiting for b, which was submitted to this run's coordinator" not in noted:
        noted = first.stderr.readline()
    later.go.touch()
    later.ends(second)
    runs.ends(first)
    assert (first.returncode, second.returncode) == (0, 0)


def test_two_names_of_one_machine_are_refused(runs):
    pools = {**POOLS, "train": {"nodes": [{"name": "t0", "host": "b"}]}}
    _write(runs, {"a": {}}, coordinator={"pools": pools}, hosts={"a": {"via": "local"}, "b": {"via": ["env"]}})
    noted = runs.ends(launcher := runs.start())
    assert launcher.returncode == 1 and "hosts b and a are one machine (127.0.0.1)" in noted
