"""Comparisons of policies, in one process and in several."""

import functools
import os

import pytest

from research.simulate import Study, in_processes, simulate
from research.workload.varying import Varying
from research.workload.workload import TraceRow, find_shapes
from verl_mux.errors import Failure, UserError
from verl_mux.placement.model import OURS, TESTBED

ROWS = [TraceRow(f"job{i}", i * 0.7, 1.0 + 5 * i % 7) for i in range(7)]
SEEDS = 2


@pytest.mark.parametrize("shapes", ["balanced", "rollout-heavy", "train-heavy", "mixed"])
def test_no_policy_that_keeps_its_slos_costs_less_than_the_optimum_in_the_long_run(shapes):
    study = Study(
        rows=ROWS, shapes=find_shapes(shapes), slo=(1.0, 2.0), policies=("optimum", "live", "ours", "colocated", "solo"),
        cluster=TESTBED, rules=OURS, varying=Varying(0.1, 2.0), move_s=900.0, movable=True, seeds=SEEDS, max_optimum_jobs=1,
    )  # fmt: skip
    found = {name: each["usd_per_hour_mean"] for name, each in simulate(study)["policies"].items()}
    assert found["optimum"] <= 1e-6 + min(found.values()), found


def squared(task: int) -> int:
    return task * task


def refusing(refused: tuple[int, ...], task: int) -> int:
    if task in refused:
        raise UserError(f"task {task}")
    return task


def dying(task: int) -> int:
    os._exit(1)


@pytest.mark.parametrize("processes", [1, 2, 9])
def test_results_come_in_the_order_of_the_tasks_and_all_progress_is_told(processes):
    told = []
    assert in_processes(squared, [3, 0, 2], lambda: told.append(1), processes) == [9, 0, 4]
    assert len(told) == 3


@pytest.mark.parametrize("processes", [1, 2])
def test_the_error_of_a_task_is_the_error_of_all(processes):
    with pytest.raises(UserError, match="^task 1$"):
        in_processes(functools.partial(refusing, (1,)), [0, 1, 2], int, processes)


def test_a_process_that_dies_is_one_clear_line():
    with pytest.raises(Failure, match="has died"):
        in_processes(dying, [0, 1], int, 2)
