"""Arrivals without departures: what a placer that moves nobody makes of them, beside Algorithm 1 of the paper."""

import pytest

from research.workload.workload import TraceRow, draw_workload, find_shapes
from verl_mux.placement.layouts import isolated_usd
from verl_mux.placement.model import TESTBED
from verl_mux.placement.planner import Planner
from verl_mux.placement.rules import LIVE, PAPER, Rules

ROWS = [TraceRow(f"job{i}", float(i), 10.0) for i in range(100)]


def saving(rules: Rules, seed: int) -> float:
    """USD per hour of every job alone, over what they are placed for."""
    jobs = [arrival.job for arrival in draw_workload(ROWS, find_shapes("mixed"), (1.0, 2.0), seed)]
    placer = Planner.of_one(TESTBED, rules)
    for job in jobs:
        placer.admit(job)
    return sum(isolated_usd(job, TESTBED) for job in jobs) / placer.groups.usd_per_hour


@pytest.mark.parametrize("seed", range(3))
def test_live_saves_at_least_what_algorithm_1_does(seed):
    assert saving(LIVE, seed) >= saving(PAPER, seed)
