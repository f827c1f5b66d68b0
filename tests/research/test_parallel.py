"""Work that is split among processes."""

import functools
import os

import pytest

from research.simulate import in_processes
from verl_mux.errors import Failure, UserError


def squared(task: int, done) -> int:
    for _ in range(task):
        done()
    return task * task


def refusing(refused: tuple[int, ...], task: int, done) -> int:
    if task in refused:
        raise UserError(f"task {task}")
    return task


def dying(task: int, done) -> int:
    os._exit(1)


@pytest.mark.parametrize("processes", [1, 2, 9])
def test_results_come_in_the_order_of_the_tasks_and_all_progress_is_told(processes):
    told = []
    assert in_processes(squared, [3, 0, 2], lambda: told.append(1), processes) == [9, 0, 4]
    assert len(told) == 5


@pytest.mark.parametrize("processes", [1, 2])
def test_the_error_of_a_task_is_the_error_of_all(processes):
    with pytest.raises(UserError, match="^task 1$"):
        in_processes(functools.partial(refusing, (1,)), [0, 1, 2], int, processes)


def test_a_process_that_dies_is_one_clear_line():
    with pytest.raises(Failure, match="has died"):
        in_processes(dying, [0, 1], int, 2)
