"""`verl-mux plan`: what would go where, at what price, and why each alternative lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_mux.launcher.plan.jobs_file import JobsFile
    from verl_mux.placement.groups import Groups


def make_plan(given: JobsFile) -> dict[str, Any]:
    """usd_per_hour: of all groups, and of every job alone. prices: USD per GPU-hour of each known kind, None: not known."""
    import msgspec

    from verl_mux.placement.layouts import isolated_usd
    from verl_mux.placement.planner import Arrive, Planner

    planner = Planner.of_one(given.cluster, given.rules)
    answers = [(job.name, planner.answer(Arrive(job), {}, 0.0)) for job in given.jobs]
    groups = planner.placer.groups
    return {
        "jobs": [
            {**msgspec.to_builtins(found.decision), "why": _sentence(groups, name, found.because)} for name, found in answers
        ],
        "groups": [_group(group, given) for group in groups.values()],
        "usd_per_hour": groups.usd_per_hour,
        "usd_per_hour_isolated": sum(isolated_usd(job, given.cluster) for job in given.jobs),
        "prices": _prices(given),
    }


def _prices(given: JobsFile) -> dict[str, float | None]:
    table = {name: kind.usd_per_gpu_hour or None for name, kind in given.kinds.items()}
    return {**table, **{pool.kind.name: pool.kind.usd_per_gpu_hour for pool in (given.cluster.train, given.cluster.rollout)}}


def _sentence(groups: Groups, name: str, reason: str) -> str:
    """When all jobs are placed."""
    from verl_mux.placement.explain import where

    if name not in groups.home:
        return f"{name} waits: {reason}"
    pin, group = groups.pin_of(name), groups.group_of(name)
    nodes = [*pin.rollout, *pin.train]
    others = {node: [job.name for job in (*group.on_rollout(node), *group.on_train(node)) if job.name != name] for node in nodes}
    return f"{where(name, nodes, others)}, {reason}"


def _group(group: Any, given: JobsFile) -> dict[str, Any]:
    from verl_mux.placement.group_run import periods_by_job

    periods = periods_by_job(group)
    return {
        "name": group.name,
        "rollout_nodes": list(group.rollout_nodes),
        "train_nodes": list(group.train_nodes),
        "order": group.order,
        "usd_per_hour": group.usd_per_hour(given.cluster),
        "jobs": {
            job.name: {"period_s": periods[job.name].mean_s, "solo_s": job.iteration_s, "limit_s": job.limit_s}
            for job in group.jobs
        },
    }


def lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for job in found["jobs"]:
        if job["outcome"] == "queued":
            lines.append(f"{job['job']}: waits, {job['wait']}")
        else:
            nodes = f"rollout on {', '.join(job['rollout'])}; training on {', '.join(job['train'])}"
            lines.append(f"{job['job']}: {job['strategy']}, group {job['group']}, +{job['usd_per_hour']:.2f} USD/h; {nodes}")
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
