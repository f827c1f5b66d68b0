"""`verl-mux run` as a person starts it: a real launcher, coordinator and job processes; only verl's trainer is a stand-in."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launcher.runs import NODES, POOLS, Runs
from verl_mux.coordinator.bus.members import carriers
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.errors import Failure, UserError
from verl_mux.launcher.command import prepare
from verl_mux.launcher.run_file import JobSpec, RunFile
from verl_mux.launcher.run_processes import free_port


def test_a_job_that_fails_ends_only_itself_and_is_named_at_the_end(runs):
    runs.write(
        {
            "goes_on": {"overrides": [f"+until={runs.go}"]},
            "refuses": {"overrides": ["+refuse=true"]},
            "dies": {"overrides": ["+die_in=2"]},
            "follows": {"after": ["refuses"]},
            "then": {"after": ["follows"]},
        }
    )
    launcher = runs.start()
    runs.until(lambda: (runs.out / "refuses" / "exit_code").exists())
    runs.until_step("dies", 1)
    runs.until_step("goes_on", 4)  # two jobs take turns, so `dies` is dead by then, and its node was given on
    runs.go.touch()
    printed = runs.ends(launcher)
    assert launcher.returncode == 1
    end = printed.strip().splitlines()[-1]
    assert "job refuses ended with exit code 2: unknown key mux.colour" in end
    assert "job dies ended with SIGKILL" in end
    assert "job follows was not started: it comes after refuses, which failed" in end
    assert "job then was not started: it comes after follows, which failed" in end
    assert runs.steps("goes_on") == list(range(1, runs.summary()["jobs"]["goes_on"]["steps"] + 1))
    assert not carriers(runs.note("coordinator").uid)


def test_a_job_with_restarts_goes_on_from_its_checkpoint_and_is_not_said_to_have_failed(runs):
    jobs = {"beside": {"overrides": [f"+until={runs.go}"]}, "dies": {"overrides": ["+die_in=3", "+steps=6"], "restarts": 2}}
    runs.write(jobs)
    launcher = runs.start()
    runs.until_step("dies", 6)
    runs.go.touch()
    printed = runs.ends_well(launcher)
    assert "job dies ended with SIGKILL; it is started again from its newest checkpoint (1 of 2)" in printed
    assert "(2 of 2)" not in printed
    assert runs.steps("dies") == [1, 2, 3, 4, 5, 6]


def test_a_restarted_job_that_finds_no_coordinator_has_not_refused_its_keys(runs, tmp_path):
    runs.write({"dies": {"overrides": ["+die_in=3", "+steps=4", f"+deaf={tmp_path / 'deaf'}"], "restarts": 2}})
    printed = runs.ends_well(runs.start())
    assert "no coordinator answers within 30 s; it is started again from its newest checkpoint (2 of 2)" in printed
    assert runs.steps("dies") == [1, 2, 3, 4]


def test_restarts_have_an_end_and_wrong_keys_have_none(runs):
    refuses = {"overrides": ["+refuse=true"], "restarts": 3}
    runs.write({"refuses": refuses, "dies": {"overrides": ["+die_always=1"], "restarts": 1}})
    printed = runs.ends(launcher := runs.start())
    assert launcher.returncode == 1
    assert "(1 of 3)" not in printed and "(1 of 1)" in printed
    last = printed.strip().splitlines()[-1]
    assert "job refuses ended with exit code 2" in last and "job dies ended with SIGKILL" in last


def test_a_second_launcher_gives_no_job_more_restarts_than_its_file_does(runs):
    runs.write({"a": {"overrides": [f"+until={runs.go}"]}, "dies": {"overrides": ["+die_always=1"], "restarts": 1}})
    first = runs.start()
    runs.until(lambda: (note := runs.note("dies")) and note.restarts == 1 and note.pid and not carriers(note.uid))
    runs.kill(first)
    second = runs.start()
    assert any("job a runs (pid" in line for line in second.stderr)
    runs.go.touch()
    printed = runs.ends(second)
    assert second.returncode == 1 and "started again" not in printed
    assert "job dies ended with SIGKILL" in printed.strip().splitlines()[-1]


def test_where_all_that_failed_were_refused_it_is_the_users_mistake(runs):
    runs.write({"refuses": {"overrides": ["+refuse=true"]}})
    printed = runs.ends(launcher := runs.start())
    assert launcher.returncode == 2
    assert printed.strip().splitlines()[-1].startswith("verl-mux: job refuses ended with exit code 2: unknown key mux.colour")


def test_after_kill_9_of_launcher_and_coordinator_a_second_run_sees_the_jobs_through(runs):
    runs.write({"a": {"overrides": [f"+until={runs.go}"]}, "b": {"overrides": [f"+until={runs.go}"]}})
    first = runs.start()
    runs.until_step("a", 2)
    runs.kill(first)
    notes = {name: runs.note(name) for name in ("coordinator", "a", "b")}
    runs.until_step("b", runs.step("b") + 2)  # they go on without it
    os.kill(notes["coordinator"].pid, signal.SIGKILL)
    second = runs.start()
    runs.until(lambda: runs.note("coordinator").pid not in (0, notes["coordinator"].pid))
    runs.until_step("a", runs.step("a") + 3)
    assert [runs.note(name) for name in ("a", "b")] == [notes["a"], notes["b"]]
    runs.go.touch()
    printed = runs.ends_well(second)
    assert f"job a runs (pid {notes['a'].pid}" in printed
    for job in ("a", "b"):
        assert runs.steps(job) == list(range(1, runs.summary()["jobs"][job]["steps"] + 1))


def test_a_coordinator_that_is_killed_under_a_run_is_started_again(runs):
    runs.write({"a": {"overrides": [f"+until={runs.go}"]}})
    launcher = runs.start()
    runs.until_step("a", 1)
    killed = runs.note("coordinator").pid
    os.kill(killed, signal.SIGKILL)
    runs.until(lambda: runs.note("coordinator").pid not in (0, killed))
    runs.until_step("a", runs.step("a") + 2)
    runs.go.touch()
    printed = runs.ends(launcher)
    assert launcher.returncode == 0 and "is started again" in printed


def test_an_interrupt_ends_everything_that_was_taken_up(runs):
    runs.write({"a": {"overrides": [f"+until={runs.go}"]}})
    first = runs.start()
    runs.until_step("a", 1)
    runs.kill(first)
    second = runs.start()
    assert any("job a runs (pid" in line for line in second.stderr)
    second.send_signal(signal.SIGINT)
    runs.ends(second)
    assert second.returncode == 130
    assert not any(carriers(runs.note(name).uid) for name in ("a", "coordinator"))


def test_two_launchers_do_not_watch_one_folder_and_another_file_is_not_taken_up(runs):
    runs.write({"a": {"overrides": [f"+until={runs.go}"]}})
    first = runs.start()
    runs.until_step("a", 1)
    assert "another `verl-mux run` watches the jobs" in runs.ends(second := runs.start())
    assert second.returncode == 2
    runs.kill(first)
    runs.write({"a": {"overrides": [f"+until={runs.go}"]}}, overrides=["+other=key"])
    assert "were started with another overrides" in runs.ends(third := runs.start())
    assert third.returncode == 2


def test_a_killed_job_resumes_from_its_checkpoint_and_nothing_is_deleted(runs):
    runs.write({"dies": {"overrides": ["+steps=5", "+die_in=4"]}, "ends": {"overrides": ["+steps=3"]}})
    runs.ends(first := runs.start())
    assert first.returncode == 1
    before = runs.summary()
    runs.ends(second := runs.start("--resume"))
    assert second.returncode == 0
    assert runs.steps("dies") == [1, 2, 3, 4, 5] and runs.steps("ends") == [1, 2, 3]
    assert [runs.summary()["jobs"][name]["steps"] for name in ("dies", "ends")] == [5, 3]
    assert (before["steps_made"], runs.summary()["steps_made"]) == (6, 2)  # the figures are of all steps
    (kept,) = (runs.out / "earlier").iterdir()
    assert json.loads((kept / "summary.json").read_text()) == before

    runs.write({"other": {"overrides": ["+steps=1"]}})
    runs.ends(third := runs.start())
    assert third.returncode == 0
    (resumed,) = set((runs.out / "earlier").iterdir()) - {kept}
    assert (resumed / "dies" / "checkpoints" / "step").read_text() == "5"
    assert not (runs.out / "dies").exists() and runs.summary()["jobs"].keys() == {"other"}


NODE = {"gpus": 1, "usd_per_hour": 1.0, "host_bytes": 100 * 2**30}
PLACED = {
    "pools": {side: {"kind": "H100", "nodes": [{"name": f"{side[0]}{number}", **NODE} for number in range(2)]} for side in NODES},
    "placement": {"move_s": 1.0},
}


def badly_placed(runs) -> dict[str, dict]:
    """Two jobs that share nodes by what they say; `long` then takes so long that they cannot both keep their SLOs.

    A step takes 0.4 s by what they say and 3.2 s in truth. The SLO lies between, with room for a second by which the second job
    may register later: the coordinator counts what the first has waited by then.
    """
    placed = {"nodes": "auto", "slo": 4.5}
    said = [f"+until={runs.go}", "+profiled_s=0.2"]
    seconds = {"short": 0.2, "long": 1.6}
    return {name: {**placed, "overrides": [*said, f"+phase_s={each}"]} for name, each in seconds.items()}


def assert_moved_without_losing_a_step(runs) -> None:
    moved = runs.lines("coordinator", "job_moved")[0]
    about = moved["extra"]
    assert moved["step"] == about["done"] + 1 and moved["duration_sec"] > 0
    assert about["nodes"] != about["before"]
    for job in ("short", "long"):
        assert runs.steps(job) == list(range(1, runs.step(job) + 1))
    phases = [said for said in runs.lines(about["job"], "phase") if said["extra"]["phase"] == "rollout"]
    before = {tuple(said["extra"]["nodes"]) for said in phases if said["step"] <= about["done"]}
    first = next(said for said in phases if said["step"] == moved["step"])
    assert before == {tuple(about["before"]["rollout"])} and first["extra"]["nodes"] == about["nodes"]["rollout"]


def test_a_job_that_was_placed_badly_is_moved_and_goes_on_with_its_next_step_on_other_nodes(runs):
    runs.write(badly_placed(runs), coordinator=PLACED)
    launcher = runs.start()
    runs.until(lambda: runs.lines("coordinator", "job_moved"))
    moved = runs.lines("coordinator", "job_moved")[0]
    runs.until_step(moved["extra"]["job"], moved["step"] + 2)
    runs.go.touch()
    printed = runs.ends_well(launcher)
    assert f"job {moved['extra']['job']} saved and left, as its coordinator asked; it is started again" in printed
    assert_moved_without_losing_a_step(runs)


def test_a_job_that_left_to_move_while_no_launcher_was_there_is_started_again_by_the_next(runs):
    runs.write(badly_placed(runs), coordinator=PLACED)
    first = runs.start()
    runs.until(lambda: all((note := runs.note(job)) and note.pid for job in ("short", "long")))
    runs.kill(first)
    runs.until(lambda: any((runs.out / job / "left_to_move").exists() for job in ("short", "long")))
    second = runs.start()
    runs.until(lambda: runs.lines("coordinator", "job_moved"))
    runs.go.touch()
    runs.ends_well(second)
    assert_moved_without_losing_a_step(runs)


def test_fillers_run_beside_the_jobs_and_end_with_the_run(runs, tmp_path):
    spare = {"pools": {**POOLS, "spare": {"nodes": [{"name": "s0"}, {"name": "s1"}]}}}
    goes_on = f"import pathlib, time; pathlib.Path({str(tmp_path / 'filled')!r}).touch(); time.sleep(600)"
    fillers = {"sums": ["python", "-c", goes_on], "fails": ["python", "-c", "raise SystemExit(5)"]}
    fillers = {name: {"pool": "spare", "command": command} for name, command in fillers.items()}
    runs.write({"a": {"overrides": [f"+until={runs.go}"]}}, coordinator=spare, fillers=fillers)
    launcher = runs.start()
    runs.until(lambda: (tmp_path / "filled").exists() and (runs.out / "fails" / "exit_code").exists())
    runs.until_step("a", 2)
    runs.go.touch()
    printed = runs.ends_well(launcher)
    assert "filler fails ended with exit code 5" in printed and "filler sums" not in printed
    assert not carriers(runs.note("sums").uid)
    filled = [runs.summary()["bubble_filled"][node] or 0.0 for node in ("s0", "s1")]  # one after the other they need one node
    assert 0 < max(filled) <= 1


def test_jobs_of_other_hosts_are_served_with_keys_and_no_secret_stands_in_a_command_line(runs):
    jobs = {"a": {"overrides": [f"+until={runs.go}"]}}
    runs.write(jobs, bind=f"tcp://127.0.0.1:{free_port('127.0.0.1')}")
    launcher = runs.start()
    runs.until_step("a", 1)
    secret = (runs.out / "keys" / "job.key_secret").read_text().split('secret-key = "')[1][:40]
    lines = list(_command_lines())
    assert lines and not any(text.encode() in line for line in lines for text in (runs.note("a").uid, secret))
    runs.go.touch()
    runs.ends_well(launcher)


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield path.read_bytes()


def test_a_run_gives_its_jobs_to_a_coordinator_that_runs_already(runs):
    served = Coordinator(make_config({"pools": POOLS}))
    address = served.start()
    try:
        runs.write({"a": {"overrides": ["+steps=2"]}}, coordinator=address)
        printed = runs.ends(launcher := runs.start())
        assert launcher.returncode == 0, printed
        assert runs.steps("a") == [1, 2] and served.snapshot()["jobs"]["a"]["steps_done"] == 2
    finally:
        served.stop()


def test_a_run_waits_for_jobs_that_were_submitted_to_its_coordinator(runs, tmp_path):
    runs.write({"a": {"overrides": [f"+until={runs.go}"]}})
    first = runs.start()
    runs.until_step("a", 1)
    (tmp_path / "later").mkdir()
    later, address = Runs(tmp_path / "later"), (runs.out / "coordinator" / "address").read_text().strip()
    later.write({"b": {"overrides": [f"+until={later.go}"]}})
    second = later.start("--at", address)
    later.until_step("b", 1)
    runs.go.touch()
    printed = ""
    while "waiting for b, which was submitted to this run's coordinator" not in printed:
        printed = first.stderr.readline()
    later.go.touch()
    later.ends(second)
    runs.ends(first)
    assert (first.returncode, second.returncode) == (0, 0)


WAIT = """
import os, sys, time
with open(sys.argv[1] + ".tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""
FAIL = """
import os, sys
while not os.path.exists(sys.argv[1]): pass
sys.exit(3)
"""


def prepared(directory, *commands: list[str]) -> None:
    prepare(RunFile(dir=str(directory), coordinator={}, jobs={"math": JobSpec(nodes=NODES)}, prepare=list(commands)))


def test_prepare_commands_that_still_run_end_when_one_fails(tmp_path):
    pid = tmp_path / "pid"
    with pytest.raises(Failure, match="exit code 3"):
        prepared(tmp_path, ["python", "-c", FAIL, str(pid)], ["python", "-c", WAIT, str(pid)])
    assert not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.parametrize(
    ("command", "words"),
    [(["no-such-command"], "cannot run 'no-such-command'"), (["python", "-c", "raise SystemExit(2)"], "refused")],
)
def test_a_prepare_command_that_is_not_there_or_refuses_is_the_users_mistake(tmp_path, command, words):
    with pytest.raises(UserError, match=words):
        prepared(tmp_path, command)
