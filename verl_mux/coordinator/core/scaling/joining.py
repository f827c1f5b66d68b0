"""Nodes that join and leave a running coordinator without its file. Pure.

A node that joined is on record, and is there again after a reload or a restart. One that leaves is given to nobody new at once;
who has it keeps it, and when nobody needs it any more it is no more.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from verl_mux.coordinator.bus.families.by_hand import NodeAdd
from verl_mux.coordinator.core.hosts import pools
from verl_mux.coordinator.core.inputs_and_instructions import NodeJoined, PoolsChanged
from verl_mux.coordinator.core.records import State
from verl_mux.coordinator.core.settings import Config, Node, Pool, check, ordinary
from verl_mux.errors import UserError

Joined = Mapping[str, list[Node]]


def like_its_pool(config: Config, asked: NodeAdd) -> Node:
    """A node as the first ordinary one of its pool, but for what is said of it. Raises UserError for one that cannot be there."""
    pool, name = asked.pool, asked.node
    if pool not in config.pools:
        raise UserError(f"no pool {pool!r} is known here; pools and their nodes: {config.describe_pools()}")
    if name in config.nodes:
        raise UserError(f"node {name!r} is there already; pools and their nodes: {config.describe_pools()}")
    most, present = config.pools[pool].most, len(config.pools[pool].nodes)
    if most is not None and present >= most:
        raise UserError(f"pool {pool!r} has {present} nodes, the most that it may have")
    first = ordinary(config.pools[pool].nodes)[0]
    gpus = first.gpus if asked.gpu_ids is None else len(asked.gpu_ids)
    price = first.usd_per_hour if asked.usd_per_hour is None else asked.usd_per_hour
    node = msgspec.structs.replace(
        first, name=name, host=asked.host, gpu_ids=asked.gpu_ids, gpus=gpus, cpus=None, usd_per_hour=price, spot=asked.spot
    )
    check(msgspec.structs.replace(config, pools=_with(config.pools, {pool: [node]})))
    return node


def comes(state: State, config: Config, what: NodeJoined) -> PoolsChanged:
    """The pools with the node that joined."""
    joined = {**state.joined, what.pool: [*state.joined.get(what.pool, []), what.node]}
    return PoolsChanged(pools=_with(config.pools, {what.pool: [what.node]}), joined=joined)


def merged(config: Config, state: State) -> PoolsChanged:
    """The pools of a file that was read, with the nodes that joined. One that the file names by now is the file's; one whose
    pool is no more is no more either."""
    joined = {
        name: left
        for name, nodes in state.joined.items()
        if name in config.pools and (left := [node for node in nodes if node.name not in config.nodes])
    }
    return PoolsChanged(pools=_with(config.pools, joined), joined=joined)


def let_go(state: State, config: Config) -> PoolsChanged | None:
    """The pools without those that leave and that nobody needs any more; None: there are none."""
    gone = {name for name in state.leaving if pools.needed_by(name, state) is None}
    if not gone:
        return None
    left = {name: msgspec.structs.replace(pool, nodes=_without(pool.nodes, gone)) for name, pool in config.pools.items()}
    return PoolsChanged(pools=left, joined={name: _without(nodes, gone) for name, nodes in state.joined.items()})


def refusal(names: list[str], state: State) -> str | None:
    """Why nobody new comes to these nodes."""
    leaving = [name for name in names if name in state.leaving]
    return f"node {leaving[0]!r} is leaving, and is given to nobody new; name others" if leaving else None


def _with(before: Mapping[str, Pool], more: Joined) -> dict[str, Pool]:
    return {
        name: msgspec.structs.replace(pool, nodes=[*pool.nodes, *more[name]]) if name in more else pool
        for name, pool in before.items()
    }


def _without(nodes: list[Node], gone: set[str]) -> list[Node]:
    return [node for node in nodes if node.name not in gone]
