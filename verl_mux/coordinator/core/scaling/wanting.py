"""When whoever starts and ends nodes is told that more would pay, or that some are idle. Pure.

The placer says which nodes are lacking, for whom (scheduling/placer/shortage.py). A job that waits gets new nodes only `delay`
seconds after they are asked for, and meanwhile they may have to be paid. So they are asked for when its waiting has cost as much
as they cost in that time, an hour of waiting counted at the price of its nodes: who has waited so long will, for all one knows,
wait longer (the rule of ski rental, which never costs more than twice what the best would have). Moves are charged with the delay
by the placer.

Everything is told once: nodes that were asked for count as coming until they join, or for two delays and OVERDUE_S.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from verl_mux.coordinator.core.inputs_and_instructions import Call, HookFailed, Instruction, Log, ScalingDue, What
from verl_mux.coordinator.core.records import AskedFor, JobState, State
from verl_mux.coordinator.core.settings import Config
from verl_mux.placement.layouts import isolated_usd
from verl_mux.placement.model import Cluster
from verl_mux.placement.shortage import STARTS, Want
from verl_mux.profiling.eventlog import events

WANTED, IDLE = "on_nodes_wanted", "on_nodes_idle"
# What was asked for and is not there by then does not come.
OVERDUE_S = 600.0


def due(state: State, config: Config, now: float) -> list[What]:
    """Whether there is anything to tell or to remember."""
    wanted = any(more > 0 for more, _ in _more(state, config, now).values())
    return [ScalingDue()] if wanted or _idle_changes(state, config, now) else []


def told(state: State, config: Config, now: float) -> list[Instruction]:
    """What is due is told and remembered."""
    return [*_tell_wanted(state, config, now), *_tell_idle(state, config, now)]


def joined(state: State, config: Config, before: set[str]) -> None:
    """Nodes came: so many fewer are on their way. before: those that there were."""
    for name, asked in state.scaling.asked_for.items():
        came = sum(node.name not in before for node in config.pools[name].nodes) if name in config.pools else asked.count
        state.scaling.asked_for[name] = msgspec.structs.replace(asked, count=max(asked.count - came, 0))


def failed(state: State, config: Config, what: HookFailed, now: float) -> list[Instruction]:
    """Told again when something else is to be told, and not before."""
    hook = WANTED if what.pool else IDLE
    asked = state.scaling.asked_for.get(what.pool)
    if asked is not None:
        lacking = sum(count for _, count in _lacking(state, config, now, what.pool))
        state.scaling.asked_for[what.pool] = AskedFor(count=max(asked.count - what.more, 0), at=now, failed=lacking)
    return [Log(events.HOOK_FAILED, {"hook": hook, "pool": what.pool, "reason": what.reason})]


# --- nodes that are lacking ---


def _tell_wanted(state: State, config: Config, now: float) -> Iterator[Instruction]:
    for name, (more, wants) in _more(state, config, now).items():
        if more <= 0:
            continue
        coming = _coming(state, config, name, now)
        state.scaling.asked_for[name] = AskedFor(count=coming + more, at=now)
        pool = config.pools[name]
        jobs = [{"job": w.job, "why": w.why, "nodes": count, "saves_usd_per_hour": w.saves_usd_per_hour} for w, count in wants]
        price = config.scheduled_pools[name].kind.usd_per_hour
        total = len(pool.nodes) + coming + more
        nodes = {"pool": name, "kind": pool.kind, "more": more, "coming": coming, "total": total}
        about = {**nodes, "usd_per_hour": price, "delay_s": pool.delay, "jobs": jobs}
        yield Log(events.NODES_WANTED, about)
        yield Call(WANTED, name, about, {key: str(about[key]) for key in ("pool", "more", "total")})


def _more(state: State, config: Config, now: float) -> dict[str, tuple[int, list[tuple[Want, int]]]]:
    """By pool: how many nodes to ask for besides those that are on their way, and what for."""
    if config.on_nodes_wanted is None or not state.scaling.wants:
        return {}
    found = {}
    for name in config.scheduled_pools:
        wants = _lacking(state, config, now, name)
        lacking = sum(count for _, count in wants)
        asked = state.scaling.asked_for.get(name)
        again = asked is None or asked.failed != lacking or now - asked.at > OVERDUE_S
        found[name] = (lacking - _coming(state, config, name, now) if again else 0, wants)
    return found


def _lacking(state: State, config: Config, now: float, pool: str) -> list[tuple[Want, int]]:
    wants = [(want, want.nodes.get(pool, 0)) for want in state.scaling.wants]
    return [(want, count) for want, count in wants if count and _pays(want, state, config, now)]


def _coming(state: State, config: Config, pool: str, now: float) -> int:
    asked = state.scaling.asked_for.get(pool)
    if asked is None or now - asked.at > 2 * config.pools[pool].delay + OVERDUE_S:
        return 0
    return asked.count


def _pays(want: Want, state: State, config: Config, now: float) -> bool:
    job, spec = state.jobs.get(want.job), state.placed.job(want.job)
    if job is None or spec is None or job.state not in (JobState.LIVE, JobState.SILENT):
        return False
    if want.why != STARTS:
        return True
    known = [(count, pool, config.pools[name].delay) for name, pool in config.scheduled_pools.items()
             if (count := want.nodes.get(name, 0))]  # fmt: skip
    price = sum(count * pool.kind.usd_per_hour * delay_s for count, pool, delay_s in known)
    return isolated_usd(spec, _cluster_of(want.job, state, config)) * (now - job.came) >= price


def _cluster_of(job: str, state: State, config: Config) -> Cluster:
    """The pools that its estimates are of."""
    pair = next((entry.pair for entry in state.placed.waiting if entry.job.name == job), "")
    return config.clusters[pair or next(iter(config.clusters))]


# --- nodes that nobody uses ---


def _tell_idle(state: State, config: Config, now: float) -> Iterator[Instruction]:
    scaling, idle = state.scaling, _idle(state, config)
    scaling.idle_since = {node: scaling.idle_since.get(node, now) for node in idle}
    scaling.idle_told = [node for node in scaling.idle_told if node in scaling.idle_since]
    long = [node for node, since in scaling.idle_since.items() if now - since >= config.idle_after]
    if set(long) <= set(scaling.idle_told):
        return
    scaling.idle_told = long
    by_hand = {node.name for nodes in state.joined.values() for node in nodes}
    told: list[dict[str, Any]] = [
        {"node": n.name, "pool": name, "host": n.host, "idle_s": now - scaling.idle_since[n.name], "joined": n.name in by_hand}
        for name, pool in config.pools.items()
        for n in pool.nodes
        if n.name in long
    ]
    yield Log(events.NODES_IDLE, {"nodes": told})
    yield Call(IDLE, "", {"nodes": told}, {"nodes": " ".join(node["node"] for node in told)})


def _idle_changes(state: State, config: Config, now: float) -> bool:
    if config.on_nodes_idle is None:
        return False
    idle, scaling = _idle(state, config), state.scaling
    if idle != scaling.idle_since.keys():
        return True
    told = set(scaling.idle_told)
    return any(now - since >= config.idle_after and node not in told for node, since in scaling.idle_since.items())


def _idle(state: State, config: Config) -> set[str]:
    """Nodes on which nobody is, is placed or waits for room, and of whose pool nobody lacks one."""
    if config.on_nodes_idle is None:
        return set()
    used = {node for job in state.jobs.values() if job.state is not JobState.ENDED for node in job.all_nodes}
    used |= {node for group in state.placed.groups for node in (*group.rollout_nodes, *group.train_nodes)}
    used |= {node for room in state.rooms.values() for node in room.all_nodes}
    used |= {*state.fenced, *state.leaving}
    lacking = {name for want in state.scaling.wants for name in want.nodes}
    return {node.name for name, pool in config.pools.items() if name not in lacking for node in pool.nodes} - used
