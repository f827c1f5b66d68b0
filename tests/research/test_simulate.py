"""Policies beside each other on small workloads."""

import pytest

from research.simulate import Study, simulate
from research.workload.varying import Varying
from research.workload.workload import TraceRow, find_shapes
from verl_mux.placement.model import TESTBED
from verl_mux.placement.rules import OURS

ROWS = [TraceRow(f"job{i}", i * 0.7, 1.0 + 5 * i % 7) for i in range(7)]
SEEDS = 2


@pytest.mark.parametrize("shapes", ["balanced", "rollout-heavy", "train-heavy", "mixed"])
def test_no_policy_that_keeps_its_slos_costs_less_than_the_optimum_in_the_long_run(shapes):
    study = Study(
        rows=ROWS, shapes=find_shapes(shapes), slo=(1.0, 2.0), policies=("optimum", "live", "ours", "colocated", "solo"),
        cluster=TESTBED, rules=OURS, varying=Varying(0.1, 2.0), move_s=900.0, movable=True, seeds=SEEDS, max_optimum_jobs=1,
    )  # fmt: skip
    found = {name: each["usd_per_hour_mean"] for name, each in simulate(study).report["policies"].items()}
    assert found["optimum"] <= 1e-6 + min(found.values()), found
