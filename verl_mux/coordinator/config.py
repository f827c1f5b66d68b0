"""What a coordinator is told at its start: pools, nodes, the schedule of segments, and its patience."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from verl_mux.coordinator.placement_config import PlacementConfig, check_placement
from verl_mux.errors import UserError
from verl_mux.scheduling.gpukinds import GpuKind
from verl_mux.yaml_file import allowed_keys, read_yaml

# Clients give a sign of life every second, so a shorter lease timeout would find every job silent.
_LEAST_SECONDS = {"lease_timeout": 1, "kill_grace": 0, "remote_grace": 0}
MODES = ("sequential", "uncoordinated", "interleaved")


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`cpus`: cores that work on this node should stay on; bytes and price are None where unknown."""

    name: str
    gpus: int = 1
    cpus: list[int] | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    usd_per_hour: float | None = None


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kind` of its GPUs (H20, H800, H100 or one of `placement.kinds`): needed where jobs are placed on it."""

    nodes: list[Node]
    kind: str | None = None


class Segment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`steps` of every job run in this mode; None, allowed in the last segment only, means all that are left."""

    mode: Literal[MODES]
    steps: int | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds. `remote_grace`: after that long a dead job's processes on other hosts, which cannot be seen
    from here, are taken for gone; None: never, their nodes stay taken until the coordinator is told otherwise.
    `metrics_port`: where Prometheus finds /metrics, 0: a free port; None: nowhere.
    `placement`: how jobs that leave their nodes to the coordinator are placed; None: every job names its nodes."""

    pools: dict[str, Pool]
    schedule: list[Segment] = msgspec.field(default_factory=lambda: [Segment(mode="interleaved")])
    expect_jobs: int = 0
    lease_timeout: float = 5.0
    kill: bool = True
    kill_grace: float = 2.0
    remote_grace: float | None = None
    metrics_port: int | None = None
    placement: PlacementConfig | None = None

    def node(self, name: str) -> Node | None:
        return next((node for pool in self.pools.values() for node in pool.nodes if node.name == name), None)

    def describe_pools(self) -> str:
        """All pools and nodes in one line, for refusals: `rollout (r0), train (t0, t1)`."""
        return ", ".join(f"{name} ({', '.join(n.name for n in pool.nodes)})" for name, pool in self.pools.items())


_KINDS = {".nodes[": Node, ".pools[": Pool, ".schedule[": Segment, ".kinds[": GpuKind, ".placement": PlacementConfig}


def make_config(given: Mapping[str, Any]) -> Config:
    """Checks a plain mapping, as YAML gives it. Raises UserError with the key, what was given and what is allowed."""
    if given.get("placement") == "scheduler":
        given = {**given, "placement": {}}
    try:
        config = msgspec.convert(given, Config)
    except msgspec.ValidationError as error:
        raise UserError(f"coordinator configuration: {error}{_allowed(error)}") from error
    _check_pools(config)
    _check_schedule(config)
    if config.placement is not None:
        check_placement(config.placement, config.pools)
    for key, least in _LEAST_SECONDS.items():
        if (seconds := getattr(config, key)) is not None and seconds <= least:
            raise UserError(f"coordinator configuration: {key} is {seconds:g} s; it must be above {least} s")
    return config


def _allowed(error: msgspec.ValidationError) -> str:
    """What may stand where msgspec says only what may not."""
    text = str(error)
    if ".schedule" in text and "enum" in text:
        return f"; allowed modes: {', '.join(MODES)}"
    if text.endswith("`$.placement`") and "unknown field" not in text:
        return "; allowed: `scheduler`, or a mapping of its keys"
    return allowed_keys(error, _KINDS, Config)


def read_config(path: str | Path) -> Config:
    """Reads a YAML file whose top level is the configuration itself, or has it under `coordinator`."""
    given = read_yaml(path)
    if not isinstance(given, dict):
        raise UserError(f"{path} holds no mapping; expected at least `pools:`")
    return make_config(given.get("coordinator", given))


def _check_pools(config: Config) -> None:
    names = [node.name for pool in config.pools.values() for node in pool.nodes]
    empty = [name for name, pool in config.pools.items() if not pool.nodes]
    if not names or empty:
        raise UserError(f"coordinator configuration: {f'pool {empty[0]!r} has' if empty else 'there are'} no nodes")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"coordinator configuration: node {twice[0]!r} is named twice; node names are unique")
    for pool, members in config.pools.items():
        if pool in names and [node.name for node in members.nodes] != [pool]:
            raise UserError(f"coordinator configuration: {pool!r} names both a pool and a node; jobs name either")
    for node in (node for pool in config.pools.values() for node in pool.nodes):
        if node.gpus < 0:
            raise UserError(f"coordinator configuration: node {node.name!r} has {node.gpus} GPUs; at least 0 is needed")


def _check_schedule(config: Config) -> None:
    if not config.schedule:
        raise UserError("coordinator configuration: schedule is empty; leave it out to interleave from the first step")
    if config.expect_jobs < 0:
        raise UserError(f"coordinator configuration: expect_jobs is {config.expect_jobs}; 0 or more is allowed")
    for number, segment in enumerate(config.schedule, start=1):
        last = number == len(config.schedule)
        if (segment.steps is None and not last) or (segment.steps is not None and segment.steps < 1):
            raise UserError(
                f"coordinator configuration: schedule entry {number} ({segment.mode}) has steps {segment.steps};"
                " a number of 1 or more is needed, and only the last entry may leave it out"
            )
