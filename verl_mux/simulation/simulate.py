"""Several policies on the same workloads, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from verl_mux.errors import UserError
from verl_mux.scheduling.model import COLOCATED, SEPARATE, Cluster
from verl_mux.scheduling.search.rules import Rules
from verl_mux.simulation.ledger import Run
from verl_mux.simulation.optimum.optimum import MAX_JOBS, Optimum
from verl_mux.simulation.outcome import Outcome, assess, summarise
from verl_mux.simulation.policies import POLICIES, Case
from verl_mux.simulation.workload.noise import STEADY, Varying, with_varying_phases
from verl_mux.simulation.workload.shapes import Shape
from verl_mux.simulation.workload.trace import TraceRow
from verl_mux.simulation.workload.uncertainty import EXACT, Estimates, with_real_lengths
from verl_mux.simulation.workload.workload import Arrival, draw_workload


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate. max_optimum_jobs: 0 to do without the optimum. move_s: of every job; None: as its cold start. movable:
    see Case."""

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
    seeds: int = 1
    max_optimum_jobs: int = MAX_JOBS


class Comparison(msgspec.Struct, frozen=True):
    """report: what `--json` prints. runs: of the first seed, by policy, for plots."""

    report: dict[str, object]
    runs: dict[str, Run]


def simulate(study: Study, on_finish: Callable[[], None] = lambda: None) -> Comparison:
    """Runs all policies on all seeds. `on_finish` is called whenever a simulated job ends, and once for each job of a
    policy that is not run phase by phase. Raises UserError for a job the cluster cannot hold."""
    if "optimum" in study.policies and not study.max_optimum_jobs:
        raise UserError("policy 'optimum' needs the optimum: give it at least 1 job at a time")
    outcomes: dict[str, list[Outcome]] = {name: [] for name in study.policies}
    first: dict[str, Run] = {}
    for seed in range(study.seeds):
        arrivals = arrivals_of(study, seed)
        optimum = Optimum([a.job for a in arrivals], study.cluster, study.rules, study.max_optimum_jobs)
        for name in study.policies:
            run = POLICIES[name](Case(arrivals, study.cluster, study.rules, seed, optimum, study.movable, on_finish))
            outcomes[name].append(assess(run, study.cluster, optimum if study.max_optimum_jobs else None))
            first.setdefault(name, run)
    report = {
        "policies": {name: summarise(found) for name, found in outcomes.items()},
        "seeds": study.seeds,
        "jobs": len(study.rows),
    }
    return Comparison(report, first)


def arrivals_of(study: Study, seed: int) -> list[Arrival]:
    """The workload of one seed, with real phase times that vary if the study asks for that. Every job can be colocated."""
    arrivals = draw_workload(study.rows, study.shapes, study.slo, seed)
    if study.estimates != EXACT:
        arrivals = with_real_lengths(arrivals, study.estimates, seed)
    if study.varying != STEADY:
        arrivals = with_varying_phases(arrivals, study.varying, seed)
    told = {"move_s": study.move_s, "modes": (SEPARATE, COLOCATED)}
    return [msgspec.structs.replace(a, job=msgspec.structs.replace(a.job, **told)) for a in arrivals]
