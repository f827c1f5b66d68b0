"""Several policies on the same workloads, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from research.ledger import Run
from research.optimum.optimum import MAX_JOBS, Optimum
from research.outcome import Outcome, assess, summarise
from research.parallel import in_processes
from research.policies import BOUNDS, POLICIES, Case
from research.workload.moments import Moments
from research.workload.noise import STEADY, STOP_EARLY, Varying, with_said_lengths, with_varying_phases
from research.workload.shapes import Shape
from research.workload.trace import TraceRow
from research.workload.uncertainty import EXACT, Estimates, with_real_lengths
from research.workload.workload import Arrival, draw_workload
from verl_mux.errors import UserError
from verl_mux.placement.model import COLOCATED, SEPARATE, Cluster
from verl_mux.placement.rules import Rules


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


class Comparison(msgspec.Struct, frozen=True):
    """report: what `--json` prints. runs: of the first seed, by policy, for plots."""

    report: dict[str, object]
    runs: dict[str, Run]


class Task(msgspec.Struct, frozen=True):
    """One policy on the workload of one seed."""

    policy: str
    seed: int


def simulate(study: Study, on_finish: Callable[[], None] = lambda: None, processes: int = 1) -> Comparison:
    """Runs all policies on all seeds, in at most so many processes. `on_finish` is called whenever a simulated job ends, and once
    for each job of a policy that is not run phase by phase. Raises UserError for a job the cluster cannot hold.

    With more than one process, call it below `if __name__ == "__main__"`, as multiprocessing asks."""
    if "optimum" in study.policies and not study.max_optimum_jobs:
        raise UserError("policy 'optimum' needs the optimum: give it at least 1 job at a time")
    tasks = [Task(name, seed) for name in study.policies for seed in range(study.seeds)]
    results = in_processes(_Runs(study), tasks, on_finish, processes)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in study.policies}
    first: dict[str, Run] = {}
    for task, (outcome, run) in zip(tasks, results, strict=True):
        outcomes[task.policy].append(outcome)
        if run is not None:
            first[task.policy] = run
    report = {
        "policies": {name: summarise(found) for name, found in outcomes.items()},
        "seeds": study.seeds,
        "jobs": len(study.rows),
    }
    return Comparison(report, first)


class _Runs:
    """The runs of a study; what policies share of a seed is made once in a process."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._seeds: dict[int, tuple[Case, Optimum]] = {}

    def __call__(self, task: Task, on_finish: Callable[[], None]) -> tuple[Outcome, Run | None]:
        """The run itself only of the first seed."""
        if task.seed not in self._seeds:
            self._seeds[task.seed] = _case(self.study, task.seed)
        case, by_the_hour = self._seeds[task.seed]
        run = POLICIES[task.policy](msgspec.structs.replace(case, on_finish=on_finish))
        optimum = by_the_hour if self.study.max_optimum_jobs and task.policy not in BOUNDS else None
        return assess(run, case.cluster, case.moments, optimum), None if task.seed else run


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
    told = {"move_s": study.move_s, "modes": (SEPARATE, COLOCATED)}
    return [msgspec.structs.replace(a, job=msgspec.structs.replace(a.job, **told)) for a in arrivals]
