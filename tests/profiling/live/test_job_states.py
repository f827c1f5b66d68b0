"""What a run does now, line by line, and on the screen of a terminal."""

import os
import shlex
import shutil
import sys

import pytest
from rich.console import Console

from tests.profiling.live.conftest import EPOCH
from tests.profiling.made_engines import make
from tests.profiling.terminal import Terminal
from verl_mux.profiling.live.screen import REPLICA_COLUMNS, Choice, Keys, render


def test_who_holds_which_nodes_and_who_waits_behind_whom(run):
    run("a", "trainer", 1, "lease_wait", 0.5, phase="rollout", nodes=["r0"])
    run("b", "trainer", 2, "lease_wait", 0.5, phase="train", nodes=["t0"])
    a, b = run.look()["jobs"]
    assert (a["runs"], a["on"], a["for_s"]) == ("rollout", ["r0"], 1.0)
    run("a", "trainer", 3, "phase", 2.0, phase="rollout", nodes=["r0"])
    run("a", "trainer", 3, "sample_ready", 0.1)
    run("b", "trainer", 5, "update_actor", 1.0)
    run("b", "trainer", 0.5, "lease_wait", 0.1, phase="rollout", nodes=["r0"])
    a, b = run.look()["jobs"]
    assert (a["runs"], a["waits_for"], a["waited_s"]) == (None, "train", 2.0)
    assert b["doing"] == "update_actor"


def test_a_job_that_asks_again_waits_behind_the_one_on_its_nodes(run):
    run("a", "trainer", 1, "lease_wait", 0, phase="train", nodes=["t0"])
    run("a", "trainer", 2, "phase", 1, phase="train", nodes=["t0"])
    run("b", "trainer", 3, "lease_wait", 0, phase="train", nodes=["t0"])
    run("a", "trainer", 4, "sample_ready", 0.1, step=2)
    a, _ = run.look()["jobs"]
    assert (a["waits_for"], a["behind"]) == ("train", ["b"])


def test_requests_by_state_of_the_newest_step(run):
    for name in ("p_0", "p_1", "p_2"):
        run("a", "rollout", 1, "request_start", request_id=name)
    run("a", "rollout", 2, "turn_engine_call", 1, request_id="p_0", turn=1)
    run("a", "rollout", 2.5, "async_rollout_request_complete", 1.5, request_id="p_0")
    run("a", "rollout", 3, "aborted_request_with_cancelled_error", request_id="p_1", reason="cut off")
    (job,) = run.look()["jobs"]
    assert job["requests"] == {"queued": 1, "parked": 1, "done": 1}
    run("a", "rollout", 9, "request_requeued", step=2, request_id="p_1")
    (job,) = run.look()["jobs"]
    assert (job["step"], job["requests"]) == (2, {"queued": 1})


def test_a_requests_way_through_engine_tool_and_reward_by_replica(run):
    def told(job=0):
        seen = run.look()
        return seen["jobs"][job]["requests"], [row["requests"] for row in seen["replicas"]]

    def turn(at, number, replica):
        about = {"request_id": "p_0", "turn": number}
        run("a", "rollout", at, "turn_pre_process", 0.1, **about)
        assert told()[0] == {"queued": 1}
        run("a", "server", at + 1, "engine_queue", 0.9, worker=replica, replica=replica, node="r0", **about)
        assert told() == ({"running": 1}, [{}] * replica + [{"running": 1}])
        run("a", "rollout", at + 2, "turn_engine_call", 1.9, replica=replica, finish_reason="stop", **about)

    run("a", "server", 0, "sleep", 0.1, step=0, worker=0)
    run("a", "rollout", 0, "request_start", request_id="p_0")
    turn(1, number=1, replica=1)
    assert told() == ({"in tool or reward": 1}, [{}, {"in tool or reward": 1}])
    run("a", "rollout", 4, "tool_execution", 0.9, request_id="p_0", turn=1)
    turn(5, number=2, replica=1)
    run("a", "rollout", 8, "reward_calculation", 0.9, request_id="p_0", score=1.0)
    assert told()[1][1] == {"scored": 1}
    run("a", "rollout", 8.1, "async_rollout_request_complete", 8.0, request_id="p_0")
    assert told()[1][1] == {"done": 1}


def test_where_requests_end_without_a_tool_what_follows_the_engine_is_the_reward(run):
    for name in ("p_0", "p_1"):
        run("a", "rollout", 1, "turn_engine_call", 1.0, request_id=name, turn=1, replica=0, finish_reason="stop")
    run("a", "rollout", 2, "async_rollout_request_complete", 2.0, request_id="p_0")
    run("a", "rollout", 3, "turn_engine_call", 1.0, request_id="p_2", turn=1, replica=0, finish_reason="stop")
    run("a", "rollout", 3, "turn_engine_call", 1.0, request_id="p_3", turn=1, replica=0, finish_reason="abort")
    (job,) = run.look()["jobs"]
    assert job["requests"] == {"in tool or reward": 1, "in reward": 1, "parked": 1, "done": 1}


def test_an_engines_line_that_comes_late_does_not_turn_a_request_back(run):
    run("a", "rollout", 1, "request_start", request_id="p_0")
    run("a", "rollout", 3, "turn_engine_call", 2.0, request_id="p_0", turn=1, replica=0, finish_reason="stop")
    run.look()
    run("a", "server", 2, "engine_queue", 1.0, request_id="p_0", turn=1, replica=0)
    assert run.look()["jobs"][0]["requests"] == {"in tool or reward": 1}


def test_validation_is_nobodys_step(run):
    run("a", "rollout", 1, "request_start", request_id="v_0", validate=True)
    run("a", "rollout", 2, "reward_calculation", 0.1, request_id="v_0")
    assert run.look()["jobs"][0]["requests"] == {}


def test_replicas_by_their_newest_counters_sorted_and_filtered(run):
    for replica, rate in ((0, 900.0), (1, 300.0)):
        where = {"replica": replica, "node": f"r{replica}"}
        counted = {"running": 4, "queued": 1, "token_usage": 0.5, "tokens_per_sec": rate, "retracted": 1}
        run("a", "server", 1, "engine_decode", 1.0, worker=replica, **where, **counted)
        run("a", "server", 2, "engine_generate", 1.0, worker=replica, **where, response_tokens=40, finish="stop")
    rate = list(REPLICA_COLUMNS).index("tokens/s")
    rows = run.look(Choice(rate))["replicas"]
    assert [(row["replica"], row["tokens_per_sec"], row["tokens"], row["done"]) for row in rows] == [
        (1, 300.0, 40, 1),
        (0, 900.0, 40, 1),
    ]
    assert [row["replica"] for row in run.look(Choice(rate, falling=True))["replicas"]] == [0, 1]
    assert [row["node"] for row in run.look(Choice(only="r1"))["replicas"]] == ["r1"]


def test_what_an_engine_last_counted_is_no_more_when_its_job_has_ended(run):
    run("a", "trainer", 1, "lease_wait", 0, phase="rollout", nodes=["r0"])
    run("a", "server", 2, "engine_decode", replica=0, node="r0", running=7, queued=1, token_usage=0.5, tokens_per_sec=9.0)
    (replica,) = run.look()["replicas"]
    assert (replica["running"], replica["age_s"]) == (7, 0.0)
    (run.folder / "a" / "exit_code").write_text("0")
    seen = run.look()
    (replica,), (job,) = seen["replicas"], seen["jobs"]
    assert (job["ended"], replica["running"], replica["tokens_per_sec"], replica["age_s"]) == (True, None, None, None)


def test_ages_count_from_the_newest_line_and_an_old_one_is_called_old(run, monkeypatch):
    run("a", "trainer", 1, "lease_wait", 0, phase="rollout", nodes=["r0"])
    run.look()
    for later, words in ((10, False), (600, True)):
        monkeypatch.setattr("time.time", lambda later=later: EPOCH + later)
        console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(render(run.state, Choice()))
        assert ("the newest line is 10 min old" in console.export_text()) is words


def test_a_job_that_is_started_again_is_shown_at_the_step_that_it_does_again(run):
    for step in range(1, 6):
        run("a", "trainer", step, "lease_wait", 0.5, step=step, phase="rollout", nodes=["r0"])
        run("a", "rollout", step, "request_start", step=step, request_id=f"{step}_0")
    run("a", "server", 5, "engine_generate", 1.0, step=5, replica=0, response_tokens=40, finish="stop")
    run.look()
    (run.folder / "a" / "exit_code").write_text("1")
    (job,) = run.look()["jobs"]
    assert (job["step"], job["ended"]) == (5, True)
    (run.folder / "a" / "exit_code").unlink()
    run("a", "trainer", 20, "lease_wait", 0.5, step=2, start="second", phase="rollout", nodes=["r0"])
    run("a", "rollout", 21, "request_start", step=2, start="second", request_id="2_0")
    run("a", "trainer", 4.5, "update_actor", 1.0, step=5)  # the first start's, and late
    told = run.look()
    (job,) = told["jobs"]
    assert (job["step"], job["ended"], job["runs"], job["doing"]) == (2, False, "rollout", "lease_wait")
    assert job["requests"] == {"queued": 1} and told["replicas"] == []


def test_a_torn_line_waits_until_it_is_whole(run):
    run("a", "trainer", 1, "step", 1.0, reward=0.5)
    assert run.look()["jobs"][0]["reward"] == 0.5
    path = run.folder / "a/events/trainer/step_1/worker_0.jsonl"
    whole = path.read_text().splitlines()[-1].replace('"reward":0.5', '"reward":0.75')
    with path.open("a") as file:
        file.write(whole[:40])
    assert run.look()["jobs"][0]["reward"] == 0.5
    with path.open("a") as file:
        file.write(whole[40:] + "\n")
    assert run.look()["jobs"][0]["reward"] == 0.75


def test_keys_sort_filter_and_end():
    choice = Choice()
    keys = Keys(choice)
    for key in "sr/r1\r":
        keys.press(key)
    assert choice == Choice(1, True, "r1")
    assert not keys.ended
    keys.press("q")
    assert keys.ended


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
    terminal("send-keys", "q")
    terminal.until(lambda text: not text)  # the pane's only process has ended, and the server with it
