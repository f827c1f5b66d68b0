"""The bench of fillers runs, and its figures are what it says they are; how good they are is no test's business."""

import sys
from datetime import datetime

import pytest

from bench.filler import _median_step, _share_filled, made_jobs
from verl_mux.errors import Failure
from verl_mux.launcher.run_intervals import Span, Timeline
from verl_mux.profiling.plain.lines import Line

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_two_made_jobs_are_timed_without_and_with_fillers():
    found = made_jobs(3, SLEEPS, {"a": (1.0, 0.2), "b": (0.2, 1.0)})
    assert set(found["period_s"]) == set(found["period_filled_s"]) == {"a", "b"}
    assert min(found["period_s"].values()) >= 1.2
    assert found["times_left"] > 0 and 0 < found["leaving_s"]["median"] <= found["leaving_s"]["max"]
    assert all(0 <= share <= 1 for share in found["bubble_filled"].values())


def _steps(*ends: float) -> Timeline:
    return Timeline([], [], [], [Span("a", "step", number, end - 1.0, end) for number, end in enumerate(ends, start=1)])


def test_only_steps_that_lie_within_a_turn_count():
    spans = _steps(1.0, 3.0, 5.0, 15.0, 18.0, 21.0, 40.0)
    assert _median_step(spans, "a", [(0.0, 6.0)]) == 2.0
    assert _median_step(spans, "a", [(14.0, 21.0)]) == 3.0


def test_a_job_without_a_whole_step_in_a_turn_is_named():
    with pytest.raises(Failure, match="job 'a' did no whole step"):
        _median_step(_steps(1.0, 9.0), "a", [(2.0, 8.0)])


def _held(start: float, end: float, node: str = "r0", **extra) -> Line:
    when = datetime.fromtimestamp(end)
    return Line(when, "lease_held", end - start, {"nodes": [node], **extra}, 0, 1, "coordinator", "")


def test_what_fillers_used_is_of_the_time_that_jobs_left_in_the_turns():
    held = [_held(0.0, 4.0), _held(4.0, 7.0, filler=True), _held(0.0, 10.0, "t0"), _held(12.0, 20.0, filler=True)]
    assert _share_filled(held, "r0", [(0.0, 10.0)]) == 0.5
    assert _share_filled(held, "t0", [(0.0, 10.0)]) is None
