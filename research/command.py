"""`verl-mux simulate`: placement policies on a trace of jobs."""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from verl_mux.errors import UserError

if TYPE_CHECKING:
    from research.simulate import Study
    from verl_mux.placement.model import Cluster, Rules

DEFAULT_POLICIES = "live,solo,colocated,gavel,random,most-idle,rollmux,ours,optimum,ideal"
# They have no queue: what a full cluster would do to them is not defined.
UNBOUNDED = ("colocated", "gavel", "random", "most-idle", "optimum", "ideal", "live")


def simulate(
    trace: Annotated[
        Path | None, typer.Argument(help="CSV of job,arrival_h,duration_h[,gpus]; without it, 300 jobs of Philly.")
    ] = None,
    shapes: Annotated[str, typer.Option(help="balanced, rollout-heavy, train-heavy, mixed, or a CSV file.")] = "mixed",
    slo: Annotated[str, typer.Option(help="uniform:LOW,HIGH or a number, both as factors of the time alone.")] = "uniform:1,2",
    cap: Annotated[int, typer.Option(help="Jobs in one co-execution group, at most.")] = 5,
    seeds: Annotated[int, typer.Option(help="Runs, each with another draw of shapes and SLOs.", min=1)] = 1,
    policies: Annotated[str, typer.Option(help="Names, separated by commas.")] = DEFAULT_POLICIES,
    rollout_nodes: Annotated[int | None, typer.Option(help="A finite rollout pool.", min=1)] = None,
    train_nodes: Annotated[int | None, typer.Option(help="A finite training pool.", min=1)] = None,
    max_jobs: Annotated[int, typer.Option(help="Solve the optimum for at most this number of jobs at a time.", min=0)] = 9,
    rule: Annotated[
        list[str] | None, typer.Option(help="Change a rule of `ours`, as in repack=off; may be repeated.", show_default=False)
    ] = None,
    estimates: Annotated[
        str, typer.Option(help="exact, or what jobs are admitted on while real lengths vary: bound, mean, quantile:0.95.")
    ] = "exact",
    noise: Annotated[float, typer.Option(help="Standard deviation over mean of each phase.", min=0.0, max=1.0)] = 0.0,
    drift: Annotated[float, typer.Option(help="Factor by which phases grow over 300 steps.", min=0.1, max=10.0)] = 1.0,
    stop_early: Annotated[
        float, typer.Option(help="Part of the jobs that end before they have done the steps that they say.", min=0.0, max=1.0)
    ] = 0.3,
    move_cost: Annotated[
        str, typer.Option(help="Seconds that a move takes a job, or measured: its cold start in the paper.")
    ] = "900",
    movable: Annotated[
        bool, typer.Option("--movable", help="Under live the launcher of a job can start it again elsewhere.")
    ] = False,
    sweep: Annotated[
        str | None, typer.Option(help="All of it for each value of one option: slo=1.1,1.5,2 or cap=1,2,3,5.", show_default=False)
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Policies and seeds that run at a time; as many as cores.", min=1)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate placement policies on a trace: cost, SLOs, idle nodes, and how far from the optimum."""
    from research.policies import find_policies
    from research.simulate import Study, sweep_studies, sweep_table
    from research.simulate import simulate as run
    from research.workload.varying import Varying, parse_estimates
    from research.workload.workload import find_shapes, packaged_trace, parse_slo, read_trace

    study = Study(
        shapes=find_shapes(shapes),
        slo=parse_slo(slo),
        policies=find_policies([name.strip() for name in policies.split(",") if name.strip()]),
        cluster=_cluster(rollout_nodes, train_nodes),
        rules=parse_rules(cap, rule or []),
        estimates=parse_estimates(estimates),
        varying=Varying(noise, drift),
        move_s=_move_s(move_cost),
        movable=movable,
        stop_early=stop_early,
        rows=packaged_trace() if trace is None else read_trace(trace),
        seeds=seeds,
        max_optimum_jobs=max_jobs,
    )
    _check_finite(study, rollout_nodes is not None or train_nodes is not None)
    processes = processes or len(os.sched_getaffinity(0))
    setting, studies = ("", {"": study}) if sweep is None else sweep_studies(sweep, study)
    with _bar(list(studies.values())) as advance:
        reports = {value: run(each, advance, processes) for value, each in studies.items()}
    if sweep is None:
        print(jsonlib.dumps(reports[""]) if json else _table(reports[""]))
        return
    report = {"sweep": setting, "runs": [{setting: float(value), **each} for value, each in reports.items()]}
    print(jsonlib.dumps(report) if json else sweep_table(report))


def _move_s(given: str) -> float | None:
    if given == "measured":
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UserError(f"--move-cost is {given!r}; seconds of at least 0 are needed, or the word measured")
    return seconds


def _cluster(rollout_nodes: int | None, train_nodes: int | None) -> Cluster:
    """The testbed's kinds of nodes; as many as needed unless a number is given."""
    import msgspec

    from verl_mux.placement.model import TESTBED

    def sized(pool, count):
        return pool if count is None else msgspec.structs.replace(pool, nodes=tuple(f"{pool.name}-{i}" for i in range(count)))

    return msgspec.structs.replace(
        TESTBED, rollout=sized(TESTBED.rollout, rollout_nodes), train=sized(TESTBED.train, train_nodes)
    )


def _check_finite(study: Study, finite: bool) -> None:
    unable = [name for name in study.policies if name in UNBOUNDED]
    if finite and unable:
        raise UserError(f"policy {unable[0]!r} does not queue; in a finite cluster allowed are: solo, rollmux, ours")


@contextlib.contextmanager
def _bar(studies: Sequence[Study]) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, one unit for each policy and seed; gives what advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("simulations"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(study.seeds * len(study.policies) for study in studies))
        yield lambda: progress.advance(task)


def _table(report: dict) -> str:
    head = ("policy", "USD/h", "peak", "SLO", "SLO real", "/optimum", "covered", "idle R", "idle T", "GPUs R", "GPUs T", "moves")
    lines = [f"{head[0]:<10}" + "".join(f"{name:>10}" for name in head[1:])]
    for name, found in report["policies"].items():
        idle, peak = found["idle"], found["peak_gpus"]
        cells = (
            f"{found['usd_per_hour_mean']:.1f}",
            f"{found['usd_per_hour_peak']:.0f}",
            f"{found['slo_attainment']:.2%}",
            f"{found['slo_attainment_real']:.2%}",
            "-" if found["cost_over_optimum_mean"] is None else f"{found['cost_over_optimum_mean']:.4f}",
            f"{found['optimum_covers']:.0%}",
            *("-" if idle[side] is None else f"{idle[side]:.1%}" for side in ("rollout", "train")),
            f"{peak['rollout']:.0f}",
            f"{peak['train']:.0f}",
            f"{found['moves_mean']:.1f}",
        )
        lines.append(f"{name:<10}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join([*lines, f"{report['jobs']} jobs, {report['seeds']} seeds; peaks are the highest over the seeds"])


def parse_rules(cap: int, changes: Sequence[str]) -> Rules:
    """The defaults with this cap and `name=value` changes: on or off, or a number. Raises UserError."""
    from research.policies import PaperRules

    fields = {field.name: field.default for field in msgspec.structs.fields(PaperRules)}
    changed: dict[str, object] = {"cap": cap}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in fields:
            raise UserError(f"rule {change!r} is not known; allowed: {', '.join(f'{known}=...' for known in fields)}")
        kind, given = type(fields[name]), {"on": True, "off": False}.get(value, value)
        try:
            changed[name] = msgspec.convert(given, kind, strict=kind is bool)
        except msgspec.ValidationError:
            what = {bool: "on or off", int: "a whole number", float: "a number"}[kind]
            raise UserError(f"rule {change!r} is not understood; give {what}") from None
    return msgspec.structs.replace(PaperRules(), **changed)
