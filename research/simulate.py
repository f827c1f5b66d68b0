"""Several policies on the same workloads, over several seeds, values of a setting, and processes. Called by command.py and the
paper's re-run; starts processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

import msgspec

from research.optimum import MAX_JOBS, Optimum
from research.outcome import Outcome, assess, summarise
from research.policies import BOUNDS, POLICIES, Case
from research.workload.varying import (
    EXACT,
    STEADY,
    STOP_EARLY,
    Estimates,
    Moments,
    Varying,
    with_real_lengths,
    with_said_lengths,
    with_varying_phases,
)
from research.workload.workload import Arrival, Shape, TraceRow, draw_workload, parse_slo
from verl_mux.errors import Failure, UserError
from verl_mux.placement.model import COLOCATED, SEPARATE, Cluster, Rules

T = TypeVar("T")
R = TypeVar("R")
_WORK: list[Callable] = []  # of this process


def in_processes(work: Callable[[T], R], tasks: Sequence[T], on_progress: Callable[[], None], processes: int) -> list[R]:
    """Results in the order of the tasks, which begin in that order; `on_progress` is called when one is done. With one process or
    one task all is done in this process. Raises the first error that a task raises, and Failure if a process dies."""
    if min(processes, len(tasks)) < 2:
        results = []
        for task in tasks:
            results.append(work(task))
            on_progress()
        return results
    context = get_context("spawn")  # a progress bar has a thread, which does not survive a fork
    with ProcessPoolExecutor(min(processes, len(tasks)), context, _begin, (work,)) as pool:
        futures = [pool.submit(_run, task) for task in tasks]
        try:
            for future in as_completed(futures):
                future.result()
                on_progress()
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise Failure("a process of the simulation has died; was there enough memory? fewer processes need less") from error
        except BaseException:  # what still runs is of no use; else all are waited for, those too that have hardly started
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(work: Callable) -> None:
    """Each process keeps `work`, which remembers what its tasks share."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt gives one line, not one traceback from each process
    _WORK[:] = [work]


def _run(task: Any) -> Any:
    return _WORK[0](task)


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate. max_optimum_jobs: 0 to do without the optimum. move_s: of every job; None: as its cold start. movable:
    see Case. stop_early: the part of jobs that end before they have done as much as they said."""

    rows: Sequence[TraceRow]
    shapes: Sequence[Shape]
    slo: tuple[float, float]
    policies: Sequence[str]
    cluster: Cluster
    rules: Rules
    estimates: Estimates = EXACT
    varying: Varying = STEADY
    move_s: float | None = None
    movable: bool = False
    stop_early: float = STOP_EARLY
    seeds: int = 1
    max_optimum_jobs: int = MAX_JOBS


class Task(msgspec.Struct, frozen=True):
    """One policy on the workload of one seed."""

    policy: str
    seed: int


def simulate(study: Study, on_progress: Callable[[], None] = lambda: None, processes: int = 1) -> dict[str, Any]:
    """Runs all policies on all seeds, in at most `processes` processes; returns what `--json` prints. Raises UserError for a job
    the cluster cannot hold. With more than one process, call it below `if __name__ == "__main__"`, as multiprocessing asks."""
    if "optimum" in study.policies and not study.max_optimum_jobs:
        raise UserError("policy 'optimum' needs the optimum: give it at least 1 job at a time")
    tasks = [Task(name, seed) for name in study.policies for seed in range(study.seeds)]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in study.policies}
    for task, outcome in zip(tasks, in_processes(_Runs(study), tasks, on_progress, processes), strict=True):
        outcomes[task.policy].append(outcome)
    policies = {name: summarise(found) for name, found in outcomes.items()}
    return {"policies": policies, "seeds": study.seeds, "jobs": len(study.rows)}


class _Runs:
    """The runs of a study; what policies share of a seed is made once in a process."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._seeds: dict[int, tuple[Case, Optimum]] = {}

    def __call__(self, task: Task) -> Outcome:
        if task.seed not in self._seeds:
            self._seeds[task.seed] = _case(self.study, task.seed)
        case, by_the_hour = self._seeds[task.seed]
        optimum = by_the_hour if self.study.max_optimum_jobs and task.policy not in BOUNDS else None
        return assess(POLICIES[task.policy](case), case.cluster, case.moments, optimum)


def _case(study: Study, seed: int) -> tuple[Case, Optimum]:
    """With the optimum by the hour, to hold every moment against."""
    arrivals = arrivals_of(study, seed)
    moments = {arrival.job.name: Moments(arrival) for arrival in arrivals}
    jobs = [job for its in moments.values() for job in its.jobs]
    by_work, by_the_hour = (
        Optimum(jobs, study.cluster, msgspec.structs.replace(study.rules, count_stays=counted), study.max_optimum_jobs)
        for counted in (True, False)
    )
    return Case(arrivals, moments, study.cluster, study.rules, seed, by_work, study.movable), by_the_hour


def arrivals_of(study: Study, seed: int) -> list[Arrival]:
    """The workload of one seed, with real phase times that vary if the study asks for that. Every job can be colocated."""
    arrivals = draw_workload(study.rows, study.shapes, study.slo, seed)
    if study.estimates != EXACT:
        arrivals = with_real_lengths(arrivals, study.estimates, seed)
    if study.varying != STEADY:
        arrivals = with_varying_phases(arrivals, study.varying, seed)
    arrivals = with_said_lengths(arrivals, study.stop_early, seed)
    announced = {"move_s": study.move_s, "modes": (SEPARATE, COLOCATED)}
    return [msgspec.structs.replace(a, job=msgspec.structs.replace(a.job, **announced)) for a in arrivals]


def sweep_studies(spec: str, study: Study) -> tuple[str, dict[str, Study]]:
    """`slo=1.1,1.5,2` or `cap=1,2,3,5`: the setting, and the study by value as given. Raises UserError, for a bad value too."""
    setting, _, given = spec.partition("=")
    values = [value.strip() for value in given.split(",") if value.strip()]
    if setting not in ("slo", "cap") or not values:
        raise UserError(f"--sweep is {spec!r}; allowed: slo=NUMBER,NUMBER,... or cap=JOBS,JOBS,...")
    return setting, {value: _with(study, setting, value) for value in values}


def _with(study: Study, setting: str, value: str) -> Study:
    if setting == "slo":
        return msgspec.structs.replace(study, slo=parse_slo(value))
    try:
        cap = int(value)
    except ValueError as error:
        raise UserError(f"--sweep cap: {value!r} is not a whole number of jobs") from error
    return msgspec.structs.replace(study, rules=msgspec.structs.replace(study.rules, cap=cap))


def sweep_table(report: dict) -> str:
    """USD per hour and real SLO attainment of each policy, a line for each value."""
    setting, runs = report["sweep"], report["runs"]
    policies = runs[0]["policies"]
    lines = [_line([setting, *policies])]
    for run in runs:
        cells = (f"{found['usd_per_hour_mean']:.1f} {found['slo_attainment_real']:6.1%}" for found in run["policies"].values())
        lines.append(_line([f"{run[setting]:g}", *cells]))
    return "\n".join([*lines, f"USD/h and SLO real; {runs[0]['jobs']} jobs, {runs[0]['seeds']} seeds"])


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:<6}" + "".join(f"{cell:>16}" for cell in cells[1:])
