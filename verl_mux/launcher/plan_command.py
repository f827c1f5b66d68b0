"""`verl-mux plan`: what would go where, at what price, and why each alternative lost; or what memory jobs need.

Runs on the command line; called by cli.py; prints.
"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from verl_mux.errors import UserError
from verl_mux.launcher.plan_jobs import JobsFile, read_jobs
from verl_mux.memory.certificate.certify import Certificate
from verl_mux.placement.explain import where
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.groups import Groups, isolated_usd
from verl_mux.placement.planner import Answer, Arrive, Planner


def plan(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="YAML: jobs, and optionally pools and rules. With --memory: composed verl configs or run files."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Say what the jobs need of GPUs and hosts that they share, and whether it fits.")
    ] = False,
    pools: Annotated[Path | None, typer.Option(help="With --memory: a coordinator's file, for what its nodes have.")] = None,
    observed: Annotated[
        Path | None, typer.Option(help="With --memory: the folder of a run whose measured bytes correct it.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Place the jobs of a file and say where each goes and why; or, with --memory, certify what they need before they run.

    The certificate's exit code is 1 where they do not fit.
    """
    if not memory and (pools is not None or observed is not None):
        raise UserError("--pools and --observed belong to --memory")
    if not files:
        raise UserError("give a file of jobs")
    if memory:
        from verl_mux.launcher.plan_memory import certificate_of

        found = certificate_of(files, pools, observed)
        print(jsonlib.dumps(found.to_dict()) if json else "\n".join(_certificate_lines(found)))
        if not found.fits:
            raise typer.Exit(1)
        return
    if len(files) != 1:
        raise UserError(f"{len(files)} files are given; without --memory one is allowed")
    placed = make_plan(read_jobs(files[0]))
    print(jsonlib.dumps(placed) if json else "\n".join(plan_lines(placed)))


def _certificate_lines(found: Certificate) -> list[str]:
    lines = [*found.notes]
    for job, parameters in found.parameters.items():
        active = f", {parameters.active / 1e9:.2f} active" if parameters.active != parameters.total else ""
        kv = found.per_token_kv_bytes[job] / 1024
        lines.append(f"{job}: {parameters.total / 1e9:.2f} billion parameters{active}; {kv:.0f} KiB of KV cache a token")
    for node, gpu in found.gpus.items():
        lines.append(f"{node}, one GPU of {gpu.capacity / 1e9:.1f} GB:")
        for name, phase in gpu.phases.items():
            kinds = ", ".join(f"{kind} {num_bytes / 1e9:.2f}" for kind, num_bytes in phase.bytes.items() if num_bytes)
            lines.append(f"    {name:8}{phase.total / 1e9:7.1f} GB ({phase.job}: {kinds})")
    for node, host in found.hosts.items():
        of = "" if host.capacity is None else f" of {host.capacity / 1e9:.0f}"
        jobs = ", ".join(f"{job} {num_bytes / 1e9:.0f}" for job, num_bytes in host.jobs.items())
        lines.append(f"{node}, its host: {host.total / 1e9:.0f} GB{of} ({jobs})")
    lines += [f"does not fit: {reason}" for reason in found.why_not]
    for job, share in found.largest_gpu_memory_utilization.items():
        lines.append(f"{job}: the largest gpu_memory_utilization that fits is {'none' if share is None else f'{share:.2f}'}")
    return [*lines, "fits" if found.fits else "does not fit"]


def make_plan(given: JobsFile) -> dict[str, Any]:
    """usd_per_hour: of all groups, and of every job alone. prices: USD per GPU-hour of each known kind, None: not known."""
    planner = Planner.of_one(given.cluster, given.rules)
    answers = [(job.name, planner.answer(Arrive(job), {}, explained=None)) for job in given.jobs]
    groups = planner.placer.groups
    return {
        "jobs": [
            {**msgspec.to_builtins(found.decision), "periods": _periods(found), "why": _sentence(groups, name, found.because)}
            for name, found in answers
        ],
        "groups": [_group(group, given) for group in groups.values()],
        "usd_per_hour": groups.usd_per_hour,
        "usd_per_hour_isolated": sum(isolated_usd(job, given.cluster) for job in given.jobs),
        "prices": {
            **{name: kind.usd_per_gpu_hour or None for name, kind in given.kinds.items()},
            **{pool.kind.name: pool.kind.usd_per_gpu_hour for pool in (given.cluster.train, given.cluster.rollout)},
        },
    }


def _periods(found: Answer) -> dict[str, Any]:
    """Of every job of the group of the one that came, settled."""
    return {name: {"mean_s": seconds} for group in found.changed for name, seconds in group_periods(group).items()}


def _sentence(groups: Groups, name: str, reason: str) -> str:
    """Where the job is and why, when all jobs are placed."""
    if name not in groups.home:
        return f"{name} waits: {reason}"
    pin, group = groups.pin_of(name), groups.group_of(name)
    nodes = [*pin.rollout, *pin.train]
    others = {node: [job.name for job in (*group.on_rollout(node), *group.on_train(node)) if job.name != name] for node in nodes}
    return f"{where(name, nodes, others)}, {reason}"


def _group(group: Any, given: JobsFile) -> dict[str, Any]:
    periods = group_periods(group)
    return {
        "name": group.name,
        "rollout_nodes": list(group.rollout_nodes),
        "train_nodes": list(group.train_nodes),
        "order": group.order,
        "usd_per_hour": group.usd_per_hour(given.cluster),
        "jobs": {
            job.name: {"period_s": periods[job.name], "solo_s": job.iteration_s, "limit_s": job.limit_s} for job in group.jobs
        },
    }


def plan_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for job in found["jobs"]:
        if job["outcome"] == "queued":
            lines.append(f"{job['job']}: waits, {job['wait']}")
        else:
            nodes = f"rollout on {', '.join(job['rollout'])}; training on {', '.join(job['train'])}"
            lines.append(f"{job['job']}: group {job['group']}; {nodes}")
        lines.append(f"    {job['why']}")
        for other in job["alternatives"]:
            own = "alone" if other["strategy"] == "isolated" else other["strategy"]
            where = f"group {other['group']}" if other["group"] else own
            lines.append(f"    not {where}: {other['why']}")
    for group in found["groups"]:
        members = ", ".join(
            f"{name} {job['period_s']:.0f} s (alone {job['solo_s']:.0f}, allowed {job['limit_s']:.0f})"
            for name, job in group["jobs"].items()
        )
        lines.append(f"group {group['name']}: {group['usd_per_hour']:.2f} USD/h; an iteration of {members}")
    lines.append(f"{found['usd_per_hour']:.2f} USD/h; every job alone {found['usd_per_hour_isolated']:.2f}")
    known = ", ".join(f"{name} {usd:.2f}" for name, usd in found["prices"].items() if usd is not None)
    return [*lines, f"USD per GPU-hour: {known}"]
