"""Runs of a study that do not depend on each other, in several processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from typing import Any, ClassVar, TypeVar

from verl_mux.errors import Failure

POLL_S = 0.2

T = TypeVar("T")
R = TypeVar("R")
# (a task, what to call whenever something of it is done) -> its result. It and its results are pickled.
Work = Callable[[T, Callable[[], None]], R]


def in_processes(work: Work[T, R], tasks: Sequence[T], on_progress: Callable[[], None], processes: int) -> list[R]:
    """Results in the order of the tasks, which begin in that order. With one process or one task all is done in this process.
    Raises the first error that a task raises, and Failure if a process dies."""
    if min(processes, len(tasks)) < 2:
        return [work(task, on_progress) for task in tasks]
    context = get_context("spawn")  # a progress bar has a thread, which does not survive a fork
    done = context.Value("Q")
    with ProcessPoolExecutor(min(processes, len(tasks)), context, _begin, (work, done)) as pool:
        futures = [pool.submit(_run, task) for task in tasks]
        try:
            _follow(futures, done, on_progress)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise Failure("a process of the simulation has died; was there enough memory? fewer processes need less") from error
        except BaseException:  # what still runs is of no use; else all are waited for, those too that have hardly started
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _follow(futures: Sequence[Future], done: Synchronized, on_progress: Callable[[], None]) -> None:
    """Until all are done or one has failed, whose error is raised."""
    told, pending = 0, set(futures)
    while pending:
        ended, pending = wait(pending, POLL_S)
        for future in [future for future in futures if future in ended]:
            future.result()
        for _ in range(done.value - told):
            on_progress()
            told += 1


class _Worker:
    """What one of the processes was begun with."""

    work: ClassVar[Work]
    done: ClassVar[Synchronized]


def _begin(work: Work, done: Synchronized) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever interrupts wants one line, not one traceback from each process
    _Worker.work, _Worker.done = staticmethod(work), done


def _run(task: Any) -> Any:
    return _Worker.work(task, _count)


def _count() -> None:
    with _Worker.done.get_lock():
        _Worker.done.value += 1
