"""The moves of a run, from an event log written by hand."""

import json
from datetime import timedelta

from tests.launcher.made_run import ORIGIN, MadeRun
from verl_mux.launcher import run_intervals

OLD, NEW = {"rollout": ["r0"], "train": ["t0"]}, {"rollout": ["r1"], "train": ["t0"]}


def told(run, at, event, duration=None, **extra):
    line = {"timestamp": (ORIGIN + timedelta(seconds=at)).isoformat(), "event": event, "extra": extra, "workid": 0, "step": 0}
    line |= {"duration_sec": duration} if duration is not None else {}
    run.raw("coordinator", "coordinator", 0, 0, json.dumps(line))


def asked_and_moved(run, asked, moved, number, done):
    told(run, asked, "move_asked", job="a", number=number, nodes=NEW, before=OLD, group="g1", expected_s=60.0)
    told(run, moved, "job_moved", moved - asked, job="a", number=number, nodes=NEW, before=OLD, done=done)


def read(run):
    return run_intervals.read_moves(run.directory, run_intervals.read(run.directory, ["a"]))


def test_a_move_is_told_with_what_it_took_and_the_rewards_on_both_sides_of_it(tmp_path):
    run = MadeRun(tmp_path)
    run.steps("a", [10, 20, 30, 90, 100], rewards=[0.1, 0.2, 0.3, 0.5, None])
    asked_and_moved(run, 25, 80, number=4, done=3)
    told(run, 85, "move_asked", job="a", number=5, nodes=OLD, before=NEW, group="g1", expected_s=55.0)  # not over yet
    (move,) = read(run)
    assert (move["job"], move["from"], move["to"], move["after_step"]) == ("a", OLD, NEW, 3)
    assert (move["took_s"], move["expected_s"]) == (55.0, 60.0)
    assert (move["steps_lost"], move["steps_doubled"], move["reward_before"], move["reward_after"]) == (0, 0, 0.2, 0.5)
    told_so = "moved a after step 3 from r0, t0 to r1, t0 in 55 s (60 expected); steps lost 0, doubled 0; reward 0.20->0.50"
    assert run_intervals.move_sentence(move) == told_so


def test_a_step_that_was_done_twice_or_never_is_counted(tmp_path):
    run = MadeRun(tmp_path)
    run.steps("a", [10, 20, 30])
    run.event("a", "step", 3, 80, 90)
    run.event("a", "step", 5, 100, 110)
    asked_and_moved(run, 25, 80, number=1, done=3)
    (move,) = read(run)
    assert (move["steps_lost"], move["steps_doubled"], move["reward_after"]) == (1, 1, None)


def test_a_run_without_moves_has_none(tmp_path):
    run = MadeRun(tmp_path)
    run.steps("a", [10, 20])
    assert read(run) == []
