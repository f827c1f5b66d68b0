"""Gauges and keys of verl-mux top."""

import shlex
import shutil
import sys

import pytest

from tests.profiling.live.conftest import EPOCH
from tests.profiling.made_engines import make
from tests.profiling.terminal import Terminal
from verl_mux.coordinator import prometheus
from verl_mux.profiling.live.job_states import State
from verl_mux.profiling.live.screen import METRICS, QUIET_S, samples

R0 = {"replica": 0, "node": "r0"}
COUNTED = {"running": 4, "queued": 1, "token_usage": 0.5, "tokens_per_sec": 900.0, "retracted": 2}


@pytest.fixture
def noted(run):
    """The run's gauges at a time: {(metric, its labels' values): value}."""

    def at(now):
        run.look()
        return {(name, *labels.values()): value for name, labels, value in samples(run.state, EPOCH + now)}

    return at


def test_each_replica_has_its_newest_counters_and_its_step(run, noted):
    run("a", "server", 1, "engine_generate", 1.0, **R0, response_tokens=40, finish="stop")
    run("a", "server", 2, "engine_decode", 1.0, **R0, **COUNTED)
    found = noted(3)
    assert found == {
        ("mux_top_quiet_seconds",): 1,
        ("mux_top_replica_running", "a", "0", "r0"): 4,
        ("mux_top_replica_queued", "a", "0", "r0"): 1,
        ("mux_top_replica_kv_usage", "a", "0", "r0"): 0.5,
        ("mux_top_replica_tokens_per_second", "a", "0", "r0"): 900,
        ("mux_top_replica_step", "a", "0", "r0"): 1,
        ("mux_top_replica_stays_done", "a", "0", "r0"): 1,
        ("mux_top_replica_tokens", "a", "0", "r0"): 40,
        ("mux_top_replica_retracted", "a", "0", "r0"): 2,
    }


def test_counters_of_an_engine_that_sleeps_are_not_told(run, noted):
    run("a", "server", 1, "engine_decode", 1.0, **R0, **COUNTED)
    running = ("mux_top_replica_running", "a", "0", "r0")
    assert running in noted(1 + QUIET_S) and running not in noted(2 + QUIET_S)
    assert noted(2 + QUIET_S)["mux_top_quiet_seconds",] == 1 + QUIET_S


def test_who_holds_a_node_and_who_waits_for_it(run, noted):
    run("a", "trainer", 1, "lease_wait", 0, phase="train", nodes=["t0"])
    run("a", "trainer", 2, "phase", 1, phase="train", nodes=["t0"])
    run("b", "trainer", 3, "lease_wait", 0, phase="train", nodes=["t0", "t1"])
    run("a", "trainer", 4, "sample_ready", 0.1, step=2)
    found = noted(10)  # nothing was logged meanwhile: a wait goes on by the clock
    assert found["mux_top_lease_waited_seconds", "t0", "a", "train"] == 6
    assert found["mux_top_lease_held_seconds", "t0", "b", "train"] == 7
    assert found["mux_top_lease_held_seconds", "t1", "b", "train"] == 7
    run("b", "trainer", 11, "phase", 8, phase="train", nodes=["t0"])
    assert [key[1] for key in noted(11) if key[0] == "mux_top_lease_held_seconds"] == ["t1"]


def test_a_wait_for_nodes_that_no_line_has_named_is_of_none(run, noted):
    run("a", "trainer", 1, "lease_wait", 0, phase="rollout", nodes=["r0"])
    run("a", "trainer", 2, "sample_ready", 0.1)
    assert noted(5)["mux_top_lease_waited_seconds", "", "a", "train"] == 3


def test_a_jobs_step_and_its_requests_by_state(run, noted):
    run("a", "trainer", 1, "step", 7.5, reward=0.25)
    run("a", "rollout", 2, "request_start", step=2, request_id="p_0")
    found = noted(3)
    assert (found["mux_top_job_step", "a"], found["mux_top_job_step_seconds", "a"], found["mux_top_job_reward", "a"]) == (
        2,
        7.5,
        0.25,
    )
    assert found["mux_top_job_requests", "a", "queued"] == 1 and found["mux_top_job_requests", "a", "done"] == 0


def test_of_a_job_that_has_ended_only_its_last_step_is_left(run, noted):
    run("a", "trainer", 1, "lease_wait", 0, phase="rollout", nodes=["r0"])
    run("a", "server", 2, "engine_decode", 1.0, **R0, **COUNTED)
    run("b", "trainer", 2, "lease_wait", 0, phase="train", nodes=["t0"])
    run.look()
    (run.folder / "a" / "exit_code").write_text("0")
    found = noted(3)
    assert found["mux_top_job_ended", "a"] == 1 and found["mux_top_job_ended", "b"] == 0
    assert {key[0] for key in found if "a" in key} == {
        "mux_top_job_ended",
        "mux_top_job_step",
        "mux_top_job_step_seconds",
        "mux_top_job_reward",
    }


def test_of_nothing_there_is_nothing(tmp_path):
    assert list(samples(State(tmp_path), EPOCH)) == []


def test_a_coordinator_has_none_of_these_names():
    assert not METRICS.keys() & prometheus.METRICS.keys()


@pytest.fixture
def terminal(tmp_path):
    make(tmp_path / "run", seed=1, steps=2, requests=24)
    command = f"{sys.executable} -m verl_mux top {shlex.quote(str(tmp_path / 'run'))} --every 0.2"
    screen = Terminal(tmp_path / "tmux", command)
    yield screen
    screen("kill-server")


def rows(screen: str) -> list[str]:
    """Of the job, in both tables. A screen that is looked at while it is drawn holds some of the old and some of the new."""
    return [line for line in screen.splitlines() if line.split()[:1] == ["a"]]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_it_shows_sorts_filters_and_ends(terminal):
    terminal.until(lambda text: all(words in text for words in ("run: 1 jobs, 4 replicas", "job ^", "tokens/s")))
    terminal("send-keys", "s")
    terminal.until(lambda text: "replica ^" in text)
    terminal("send-keys", "r")
    terminal.until(lambda text: "replica v" in text)
    terminal("send-keys", "/", "r1", "Enter")
    terminal.until(lambda text: "only replicas with 'r1'" in text and len(rows(text)) == 3)
    terminal.until(lambda text: sum(" r1 " in row for row in rows(text)) == 2)
    terminal("send-keys", "Tab")
    terminal.until(lambda text: "keys are for jobs" in text)
    terminal("send-keys", "s")
    terminal.until(lambda text: "step ^" in text and "replica v" in text)
    terminal("send-keys", "/", "unknown", "Enter")
    terminal.until(lambda text: "only jobs with 'unknown'" in text and len(rows(text)) == 2)  # the replicas stay
    terminal("send-keys", "q")
    terminal.until(lambda text: not text)  # the pane's only process has ended, and the server with it
