"""The bench of fillers runs, and its figures are what it says they are; how good they are is no test's business."""

import sys

from bench.filler import made_jobs

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_two_made_jobs_are_timed_without_and_with_fillers():
    found = made_jobs(3, SLEEPS, {"a": (1.0, 0.2), "b": (0.2, 1.0)})
    assert set(found["period_s"]) == set(found["period_filled_s"]) == {"a", "b"}
    assert min(found["period_s"].values()) >= 1.2
    assert found["times_left"] > 0 and 0 < found["leaving_s"]["median"] <= found["leaving_s"]["max"]
    assert all(0 <= share <= 1 for share in found["bubble_filled"].values())
