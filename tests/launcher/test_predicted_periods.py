"""Predicted periods beside measured ones, from a run's event log written by hand."""

import json
from datetime import timedelta

import pytest

from tests.launcher.made_run import ORIGIN, MadeRun
from verl_mux.launcher import run_intervals


class Made(MadeRun):
    def predicted(self, at, source, periods, group="g1", rollout="r0"):
        extra = {"group": group, "source": source, "periods": periods, "limits": {}, "order": "fifo"}
        extra |= {"nodes": {"rollout": [rollout], "train": ["t0"]}, "usd_per_hour": 2.0}
        line = {"timestamp": (ORIGIN + timedelta(seconds=at)).isoformat(), "event": "group_predicted", "extra": extra}
        path = self.directory / "coordinator" / "events" / "coordinator" / "step_0" / "worker_0.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def steps(self, job, ends):
        for number, (start, end) in enumerate(zip(ends, ends[1:], strict=False), start=1):
            self.event(job, "step", number, start, end)


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path)


def found(made, *jobs):
    return run_intervals.group_periods(
        run_intervals.read_predictions(made.directory), run_intervals.read(made.directory, list(jobs))
    )


def test_a_groups_period_is_measured_from_its_prediction_on(made):
    made.steps("a", [0, 30, 41, 50, 60, 70, 80])
    made.steps("b", [0, 33, 44, 55, 64, 76])
    made.predicted(1, "estimated", {"a": 40.0, "b": 40.0})
    made.predicted(45, "observed", {"a": 11.0, "b": 11.0})
    (group,) = found(made, "a", "b")
    # a ends steps at 50, 60 and 70 (80 comes when b is through), b at 55, 64 and 76
    assert group["jobs"]["a"] == {"predicted_period_s": 11.0, "measured_period_s": 10.0, "steps": 2}
    assert group["jobs"]["b"] == {"predicted_period_s": 11.0, "measured_period_s": 10.5, "steps": 2}
    assert (group["predicted_period_s"], group["measured_period_s"], group["period_bound_s"]) == (11.0, 10.25, 40.0)
    assert group["difference"] == pytest.approx(11 / 10.25 - 1, abs=1e-4)


def test_the_same_jobs_on_other_nodes_are_another_group(made):
    made.steps("a", [0, 30, 60, 90, 120, 130, 140, 150, 160])
    made.predicted(1, "observed", {"a": 30.0}, rollout="r1")
    made.predicted(95, "estimated", {"a": 30.0})
    made.predicted(121, "observed", {"a": 11.0})
    apart, together = found(made, "a")
    assert (apart["measured_period_s"], together["measured_period_s"]) == (30.0, 10.0)
    assert together["nodes"] == {"rollout": ["r0"], "train": ["t0"]}


def test_a_group_ends_when_one_of_its_jobs_is_grouped_otherwise(made):
    made.steps("a", [0, 10, 20, 30, 40])
    made.steps("b", [0, 10, 20, 30, 40, 60, 80, 100, 120, 140])
    made.steps("c", [50, 80, 100, 120, 140])
    made.predicted(5, "observed", {"a": 10.0, "b": 10.0})
    made.predicted(42, "estimated", {"b": 15.0, "c": 15.0}, "g1")
    made.predicted(90, "observed", {"b": 20.0, "c": 20.0}, "g1")
    first, second = found(made, "a", "b", "c")
    assert list(first["jobs"]) == ["a", "b"] and first["jobs"]["b"]["steps"] == 3
    assert list(second["jobs"]) == ["b", "c"] and second["measured_period_s"] == 20.0


def test_a_job_alone_again_is_another_stay(made):
    made.steps("a", [0, 10, 20, 30, 50, 70, 90, 100, 110, 120])
    made.steps("b", [0, 50, 70, 90])
    made.predicted(5, "observed", {"a": 10.0})
    made.predicted(31, "estimated", {"a": 20.0, "b": 20.0})
    made.predicted(91, "estimated", {"a": 12.0})
    made.predicted(95, "observed", {"a": 9.0})
    assert [(g["predicted_period_s"], g["measured_period_s"]) for g in found(made, "a", "b")] == [(10.0, 10.0), (9.0, 10.0)]


def test_groups_with_too_few_steps_or_never_observed_are_left_out(made):
    made.steps("a", [0, 10, 20])
    made.predicted(5, "observed", {"a": 10.0})
    assert found(made, "a") == []
    made.predicted(1, "estimated", {"z": 10.0})
    assert found(made, "a", "z") == []
    assert run_intervals.group_periods([], run_intervals.read(made.directory, ["a"])) == []


def test_a_torn_line_is_passed_over(made):
    made.predicted(1, "observed", {"a": 1.0})
    path = next(made.directory.rglob("worker_0.jsonl"))
    path.write_text(path.read_text() + '{"event": "group_predicted", "extr')
    assert len(run_intervals.read_predictions(made.directory)) == 1
