"""What a coordinator is told at its start, as data: pools, nodes, the schedule of segments, placement, and its patience.

Pure: nothing here reads a file (`coordinator/config.py` does).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from verl_mux.coordinator.bus import limits
from verl_mux.coordinator.bus.messages import SIDES
from verl_mux.errors import UserError
from verl_mux.placement.job_needs import GPU_KINDS, GpuKind, find_kind
from verl_mux.placement.model import Cluster, NodeKind
from verl_mux.placement.model import Pool as SchedulingPool
from verl_mux.placement.rules import LIVE, Rules
from verl_mux.places.place import Place

# Thirty years: what is larger, or not a number, is a mistake.
_MOST_SECONDS = 1e9
_MOST_BYTES, _MOST_GPUS = 2**60, 10_000
# Clients give a sign of life every second, so a shorter lease timeout would find every job silent.
_LEAST_SECONDS = {"lease_timeout": 1, "kill_grace": 0, "remote_grace": 0, "filler_grace": 0, "silent_timeout": 0,
                  "hung_factor": 1, "hung_least": 0, "evict_to_disk_after": 0, "idle_after": 0, "share_half_life": 0}  # fmt: skip
Mode = Literal["sequential", "uncoordinated", "interleaved"]
MODES: tuple[Mode, ...] = get_args(Mode)
# Whom to tell: a line for a shell or a URL, or a program and its arguments.
Hook = str | list[str]
# Where the configuration names no host memory, it is no limit.
_PLENTY_GB = 1e6


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`host`: name or address of the machine that it is part of, None: unknown, and leases bind no place. `gpu_ids`: which of
    that host's GPUs it is, None: all. `cpus`: cores that work on this node should stay on; bytes and price are None where
    unknown. `spot`: it may vanish."""

    name: str
    host: limits.Name | None = None
    gpu_ids: list[int] | None = None
    gpus: int = 1
    cpus: list[int] | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    usd_per_hour: float | None = None
    spot: bool = False

    @property
    def place(self) -> Place:
        return Place(host=self.host, gpu_ids=self.gpu_ids, cpus=self.cpus)


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kind` of its GPUs (H20, H800, H100, H200 or one of `placement.kinds`): needed where jobs are placed on it. `delay`:
    seconds until a node that is wanted is there. `most`: nodes that it may have, None: no limit."""

    nodes: list[Node]
    kind: str | None = None
    delay: float = 300.0
    most: int | None = None


class Segment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`steps` of every job run in this mode; None, allowed in the last segment only, means all that are left."""

    mode: Mode
    steps: int | None = None


class PlacementConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`placement: scheduler`, or this. rollout, train: names of the pools, of one or of several each. A job is placed in a pair
    of them; what is told of its phases is of the first pair that can hold it. cap: jobs in a co-execution group. slo: of jobs
    that name none. kinds: GPU kinds of one's own, by name. observe: steps of every job of a group that are seen before
    its period is predicted from them. move_s: seconds that a job's first move is taken to last. move_timeout: seconds for which
    its nodes are kept for one that left to move."""

    rollout: str | list[str] = "rollout"
    train: str | list[str] = "train"
    cap: int = 5
    slo: float = 2.0
    kinds: dict[str, GpuKind] = {}
    observe: int = 5
    move_s: float = 900.0
    move_timeout: float = 1800.0

    def pools(self, side: str) -> list[str]:
        """Their names."""
        names = getattr(self, side)
        return [names] if isinstance(names, str) else list(names)

    def rules(self) -> Rules:
        """The very rules that `simulate` runs as `live`."""
        return msgspec.structs.replace(LIVE, cap=self.cap)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):  # dict: for what is cached
    """Times in seconds. `remote_grace`: after that long a dead job's processes on other hosts, which cannot be seen
    from here, are taken for gone; None: never, their nodes stay taken until the coordinator is told otherwise.
    `filler_grace`: a filler that has not left so long after a job asked for its nodes is ended.
    `silent_timeout`: a job that is silent for that long beyond its lease is over; None: only when another waits.
    `hung_factor`, `hung_least`: a phase is overdue when it takes so many times the job's longest of its kind, and so many
    seconds; with `evict_hung` its job is ended then.
    `metrics_port`: where Prometheus finds /metrics, 0: a free port; None: nowhere. `metrics_host`: the address it listens at.
    `evict_to_disk_after`: a job that does not fit in the hosts' memory waits, and jobs that have been there for so long are asked
    to save and leave; None: it is refused.
    `on_nodes_wanted`, `on_nodes_idle`: a command (a shell's line, or a program and its arguments) or an http(s) URL, told when
    more nodes would pay, and when some had no resident for `idle_after`; None: nobody.
    `shares`: by owner, of what jobs that name their nodes are given; 1 for all others, none: all jobs queue as they come.
    `share_half_life`: after that time what an owner was given counts for half.
    `placement`: how jobs that leave their nodes to the coordinator are placed; None: every job names its nodes."""

    pools: dict[str, Pool]
    schedule: list[Segment] = msgspec.field(default_factory=lambda: [Segment(mode="interleaved")])
    expect_jobs: int = 0
    lease_timeout: float = 20.0
    kill: bool = True
    kill_grace: float = 2.0
    remote_grace: float | None = None
    filler_grace: float = 2.0
    silent_timeout: float | None = 60.0
    hung_factor: float = 10.0
    hung_least: float = 600.0
    evict_hung: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    evict_to_disk_after: float | None = None
    on_nodes_wanted: Hook | None = None
    on_nodes_idle: Hook | None = None
    idle_after: float = 600.0
    shares: dict[str, float] = {}
    share_half_life: float = 86400.0
    placement: PlacementConfig | None = None

    @functools.cached_property
    def nodes(self) -> dict[str, Node]:
        return {node.name: node for pool in self.pools.values() for node in pool.nodes}

    def price(self, node: str) -> float | None:
        """USD per hour of a node, by itself or by its kind; None: nobody knows."""
        return self._prices.get(node)

    @functools.cached_property
    def _prices(self) -> dict[str, float | None]:
        kinds: dict[str, GpuKind] = {} if self.placement is None else self.placement.kinds
        return {node.name: _price(node, pool.kind, kinds) for pool in self.pools.values() for node in pool.nodes}

    @functools.cached_property
    def clusters(self) -> dict[str, Cluster]:
        """Each pair of pools as the scheduler sees it, where jobs are placed."""
        both = itertools.product(self.placing.pools("rollout"), self.placing.pools("train"))
        return {f"{rollout}+{train}": cluster(rollout, train, self.placing, self.pools) for rollout, train in both}

    @functools.cached_property
    def scheduled_pools(self) -> dict[str, SchedulingPool]:
        """Those of the pairs."""
        return {pool.name: pool for cluster in self.clusters.values() for pool in (cluster.rollout, cluster.train)}

    def node(self, name: str) -> Node | None:
        return self.nodes.get(name)

    @property
    def placing(self) -> PlacementConfig:
        """For what concerns jobs that were placed: there are none without it."""
        assert self.placement is not None
        return self.placement

    def describe_pools(self) -> str:
        """All pools and nodes in one line, for refusals: `rollout (r0), train (t0, t1)`."""
        return ", ".join(f"{name} ({', '.join(n.name for n in pool.nodes)})" for name, pool in self.pools.items())


def check(config: Config) -> None:
    """Raises UserError with the key, what was given and what is allowed."""
    _check_pools(config)
    _check_schedule(config)
    _check_hooks(config)
    for owner, share in config.shares.items():
        if not 0 < share < math.inf:
            raise UserError(f"coordinator configuration: shares of {owner!r} are {share:g}; a number above 0 is needed")
    if config.placement is not None:
        _check_placement(config.placement, config.pools)
    for key, least in _LEAST_SECONDS.items():
        if (seconds := getattr(config, key)) is not None and not least < seconds <= _MOST_SECONDS:
            raise UserError(
                f"coordinator configuration: {key} is {seconds:g} s; it must be above {least} s and at most {_MOST_SECONDS:g} s"
            )


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
        _check_node(node)
    _check_places(list(config.nodes.values()))


def _check_hooks(config: Config) -> None:
    for key in ("on_nodes_wanted", "on_nodes_idle"):
        hook = getattr(config, key)
        if hook is not None and not (hook.strip() if isinstance(hook, str) else hook and hook[0].strip()):
            raise UserError(f"coordinator configuration: {key} is {hook!r}; a command or an http(s) URL is needed")
    if config.on_nodes_wanted is not None and config.placement is None:
        raise UserError(
            "coordinator configuration: on_nodes_wanted takes `placement: scheduler`: jobs that name their nodes want no others"
        )
    for name, pool in config.pools.items():
        if not 0 <= pool.delay <= _MOST_SECONDS:
            raise UserError(
                f"coordinator configuration: pool {name!r} has delay {pool.delay:g} s; it must be from 0 to {_MOST_SECONDS:g} s"
            )
        if pool.most is not None and pool.most < len(pool.nodes):
            raise UserError(
                f"coordinator configuration: pool {name!r} has most {pool.most}, and {len(pool.nodes)} nodes;"
                " it must be at least as many"
            )


def _check_node(node: Node) -> None:
    where = f"coordinator configuration: node {node.name!r} has"
    if not 0 <= node.gpus <= _MOST_GPUS:
        raise UserError(f"{where} {node.gpus} GPUs; at least 0 is needed, and at most {_MOST_GPUS}")
    if any(core < 0 for core in node.cpus or ()):
        raise UserError(f"{where} cpus {node.cpus}; they are counted from 0")
    for key in ("device_bytes", "host_bytes"):
        if (size := getattr(node, key)) is not None and not 0 <= size <= _MOST_BYTES:
            raise UserError(f"{where} {key} {size}; a number from 0 to {_MOST_BYTES} is needed")
    if node.usd_per_hour is not None and not 0 <= node.usd_per_hour < math.inf:
        raise UserError(f"{where} usd_per_hour {node.usd_per_hour:g}; a price of 0 or more is needed")


def _check_places(nodes: list[Node]) -> None:
    """No GPU is part of two nodes."""
    taken: dict[str, list[Node]] = {}
    for node in nodes:
        if node.gpu_ids is not None and (
            len(set(node.gpu_ids)) != node.gpus or min(node.gpu_ids, default=0) < 0 or not node.host
        ):
            raise UserError(
                f"coordinator configuration: node {node.name!r} has gpu_ids {node.gpu_ids}; as many different ones as it has gpus"
                f" ({node.gpus}), counted from 0 on its host, are needed, and a host"
            )
        if not node.host:
            continue
        for other in taken.setdefault(node.host, []):
            if node.gpu_ids is None or other.gpu_ids is None or set(node.gpu_ids) & set(other.gpu_ids):
                raise UserError(
                    f"coordinator configuration: nodes {other.name!r} and {node.name!r} share GPUs of host {node.host!r};"
                    " nodes on one host need gpu_ids of their own"
                )
        taken[node.host].append(node)


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


def _check_placement(placement: PlacementConfig, pools: Mapping[str, Pool]) -> None:
    where = "coordinator configuration: placement"
    named = [(side, name) for side in SIDES for name in placement.pools(side)]
    for side, name in named:
        if name not in pools:
            raise UserError(f"{where}.{side} is {name!r}; it must be a pool: {', '.join(pools)}")
        _check_alike(name, pools[name], placement)
    for side in SIDES:
        if not placement.pools(side):
            raise UserError(f"{where}.{side} names no pool; one of these is needed, or several: {', '.join(pools)}")
    names = [name for _, name in named]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{where}: rollout and train name pool {twice[0]!r} twice; two pools are needed, each for one of them")
    if not 1 <= placement.slo < math.inf:
        raise UserError(f"{where}.slo is {placement.slo:g}; an SLO is a factor of at least 1")
    if placement.observe < 1:
        raise UserError(f"{where}.observe is {placement.observe}; at least 1 step is needed")
    for key, least in (("move_s", 0.0), ("move_timeout", 1.0)):
        if not least <= (seconds := getattr(placement, key)) <= _MOST_SECONDS:
            raise UserError(f"{where}.{key} is {seconds:g} s; it must be at least {least:g} s and at most {_MOST_SECONDS:g} s")
    placement.rules()  # checks the cap


def _check_alike(name: str, pool: Pool, placement: PlacementConfig) -> None:
    """The scheduler takes a pool's nodes for alike, but that those which may vanish have a price of their own."""
    kind = find_kind(kind_name(name, pool), placement.kinds)
    for key in ("gpus", "usd_per_hour"):
        values = {getattr(node, key) for node in ordinary(pool.nodes)} if key == "usd_per_hour" else {n.gpus for n in pool.nodes}
        if len(values) > 1:
            raise UserError(
                f"coordinator configuration: pool {name!r} has nodes with different {key} ({', '.join(map(str, values))});"
                " jobs are placed on pools of nodes that are alike"
            )
    if not kind.usd_per_gpu_hour and any(node.usd_per_hour is None for node in pool.nodes):
        raise UserError(
            f"coordinator configuration: pool {name!r} ({pool.kind}) has no price, by which places are compared; give its nodes"
            " usd_per_hour, or the kind usd_per_gpu_hour"
        )


def _price(node: Node, kind: str | None, kinds: dict[str, GpuKind]) -> float | None:
    if node.usd_per_hour is not None or kind is None:
        return node.usd_per_hour
    rent = find_kind(kind, kinds).usd_per_gpu_hour if kind in {*GPU_KINDS, *kinds} else 0.0
    return max(node.gpus, 1) * rent if rent else None


def ordinary(nodes: list[Node]) -> list[Node]:
    """By whose price places are compared: nodes that do not vanish, if there are any."""
    return [node for node in nodes if not node.spot] or nodes


def kind_name(name: str, pool: Pool) -> str:
    """Of the GPUs of a pool that jobs are placed on. Raises UserError where the configuration does not say."""
    if pool.kind is None:
        raise UserError(f"coordinator configuration: pool {name!r} has no kind; jobs are placed on it, so give one (`kind: H20`)")
    return pool.kind


def cluster(rollout: str, train: str, placement: PlacementConfig, pools: Mapping[str, Pool]) -> Cluster:
    """Two pools as the scheduler sees them. Nodes that may vanish and cost more than others count as these: whoever gets one, as
    no other is free, would else seem to save by a move, and get such a one again."""
    both = _pool(rollout, pools[rollout], placement), _pool(train, pools[train], placement)
    spot = [(node, pool) for pool in both for node in pools[pool.name].nodes if node.spot]
    prices = {node.name: _price(node, pool.kind.name, placement.kinds) for node, pool in spot}
    cheaper = {node.name: usd for node, pool in spot if (usd := prices[node.name]) is not None and usd < pool.kind.usd_per_hour}
    return Cluster(rollout=both[0], train=both[1], spot=frozenset(prices), spot_usd=cheaper)


def _pool(name: str, pool: Pool, placement: PlacementConfig) -> SchedulingPool:
    first, named = ordinary(pool.nodes)[0], kind_name(name, pool)
    price = find_kind(named, placement.kinds).usd_per_gpu_hour
    if first.usd_per_hour is not None:
        price = first.usd_per_hour / max(first.gpus, 1)
    memory = min((node.host_bytes / 1e9 for node in pool.nodes if node.host_bytes is not None), default=_PLENTY_GB)
    kind = NodeKind(name=named, gpus=max(first.gpus, 1), usd_per_gpu_hour=price, host_memory_gb=memory)
    return SchedulingPool(name=name, kind=kind, nodes=tuple(node.name for node in pool.nodes))
