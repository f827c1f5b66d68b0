"""The words of placement: nodes, pools, jobs, co-execution groups and what they cost, and the rules of a placer.

Pure data; imported by every other module of placement, by the coordinator, `verl-mux plan` and research/. Seconds, GB (1e9 bytes)
and USD per hour throughout. Bad values raise UserError when the object is made.

A job iterates rollout -> train -> sync. The sync fills the rollout engine, so it holds the job's rollout nodes and counts
with the rollout that follows it. A node that turns from one job to another first pays the newcomer's switch.
A colocated job runs its rollouts on its training nodes, in turn with its training, and holds no rollout nodes.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence

import msgspec

from verl_mux.errors import UserError

MAX_NODES = 10_000  # of one job on each side; each is looked at
# How a job can be placed: with nodes of both pools, or with both phases on its training nodes.
SEPARATE, COLOCATED = "separate", "colocated"


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Frozen; `dict` only so that derived figures can be cached."""


def _check(what: str, value: float, least: float = 0.0, above: bool = False) -> None:
    if not (value > least if above else value >= least) or not value <= sys.float_info.max:
        given = value if isinstance(value, int) else f"{value:g}"  # a whole number may be larger than any float
        raise UserError(f"{what} is {given}; it must be {'above' if above else 'at least'} {least:g} and finite")


class NodeKind(_Value, frozen=True):
    """One kind of node: `gpus` on it, their price, and the host memory that jobs' states may fill."""

    name: str
    gpus: int = 8
    usd_per_gpu_hour: float = 0.0
    host_memory_gb: float = 2000.0

    def __post_init__(self) -> None:
        for field, least in (("gpus", 1), ("usd_per_gpu_hour", 0), ("host_memory_gb", 0)):
            _check(f"node kind {self.name!r}: {field}", getattr(self, field), least)

    @property
    def usd_per_hour(self) -> float:
        return self.gpus * self.usd_per_gpu_hour


class Pool(_Value, frozen=True):
    """A named set of nodes of one kind; `nodes` None means that nodes are rented as they are needed."""

    name: str
    kind: NodeKind
    nodes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and len(set(self.nodes)) < len(self.nodes):
            raise UserError(f"pool {self.name!r} names a node twice: {', '.join(self.nodes)}")

    @property
    def size(self) -> float:
        return math.inf if self.nodes is None else len(self.nodes)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Of its nodes, as far as they are named."""
        return frozenset(self.nodes or ())


class Cluster(_Value, frozen=True):
    """A rollout pool and a training pool. closed: nodes on which no further job is placed."""

    rollout: Pool
    train: Pool
    closed: frozenset[str] = frozenset()

    @functools.cached_property
    def kinds(self) -> tuple[NodeKind, NodeKind]:
        """Of rollout and training nodes."""
        return self.rollout.kind, self.train.kind

    def usd(self, rollout: float, train: float) -> float:
        """USD per hour of this number of nodes of each side."""
        return rollout * self.rollout.kind.usd_per_hour + train * self.train.kind.usd_per_hour


# The paper's testbed (RollMux, arXiv 2512.11306v2, table 1): nodes of eight; it says only "1-2 TB" of host memory.
H20 = NodeKind(name="H20", usd_per_gpu_hour=1.85)
H800 = NodeKind(name="H800", usd_per_gpu_hour=5.28)
TESTBED = Cluster(rollout=Pool(name="rollout", kind=H20), train=Pool(name="train", kind=H800))


class Estimate(_Value, frozen=True):
    """Seconds of one phase as decisions count with.

    `source`: `given`, `bound` (every response at its maximum length), `profile` (a few steps alone), `mean`, `quantile` or
    `median` of observed phases. cv: standard deviation over mean from one step to the next. unsure: the same for `seconds`.
    """

    seconds: float
    source: str = "given"
    cv: float = 0.0
    unsure: float = 0.0

    def __post_init__(self) -> None:
        _check("phase time", self.seconds)
        _check("cv of a phase", self.cv)
        _check("unsure of a phase", self.unsure)


_AT_LEAST_0 = ["sync_s", "tail_s", "rollout_switch_s", "train_switch_s", "cold_start_s", "rollout_memory_gb", "train_memory_gb"]


class JobSpec(_Value, frozen=True):
    """One verl training run as placement sees it.

    rollout, train: phase times alone on nodes, without sync and switch. tail_s: the last part of the rollout, which
    runs on few nodes' worth of GPUs and lets the next job onto the rest (0: none is migrated).
    rollout_switch_s, train_switch_s: warm load when the node ran another job before. cold_start_s: on its start. move_s: from the
    last safe step here to the first phase elsewhere, None: as cold_start_s. movable: its launcher can start it again elsewhere.
    rollout_nodes, train_nodes: nodes it needs at once on each side; *_memory_gb: host memory on each of them.
    slo: an iteration may last `slo` times the iteration alone. solo_s: that iteration as the SLO counts it, if it is
    to be another (say a measured one) than the sum of the estimates.
    modes: how it can be placed. colocated: it is placed so; a rollout then takes as long on its training nodes as on others.
    """

    name: str
    rollout: Estimate
    train: Estimate
    sync_s: float = 0.0
    tail_s: float = 0.0
    rollout_switch_s: float = 0.0
    train_switch_s: float = 0.0
    cold_start_s: float = 0.0
    move_s: float | None = None
    movable: bool = True
    rollout_nodes: int = 1
    train_nodes: int = 1
    rollout_memory_gb: float = 0.0
    train_memory_gb: float = 0.0
    slo: float = 2.0
    solo_s: float | None = None
    modes: tuple[str, ...] = (SEPARATE,)
    colocated: bool = False

    def __post_init__(self) -> None:
        where = f"job {self.name!r}:"
        self._check_modes(where)
        for least, fields in ((0, _AT_LEAST_0), (1, ("rollout_nodes", "train_nodes", "slo"))):
            for field in fields:
                _check(f"{where} {field}", getattr(self, field), least)
        for field in ("rollout_nodes", "train_nodes"):
            if (count := getattr(self, field)) > MAX_NODES:
                raise UserError(f"{where} {field} is {count}; it must be at most {MAX_NODES}")
        _check(f"{where} time of an iteration", self.iteration_s, above=True)
        if self.tail_s > self.rollout.seconds:
            raise UserError(f"{where} tail_s is {self.tail_s:g}, longer than its rollout of {self.rollout.seconds:g} s")
        if self.solo_s is not None:
            _check(f"{where} solo_s", self.solo_s, above=True)

    def _check_modes(self, where: str) -> None:
        if not self.modes or not set(self.modes) <= {SEPARATE, COLOCATED}:
            raise UserError(
                f"{where} modes are {', '.join(self.modes) or 'none'}; allowed: {SEPARATE}, {COLOCATED}, or both of them"
            )
        if COLOCATED in self.modes and self.rollout_nodes != self.train_nodes:
            raise UserError(
                f"{where} it needs {self.rollout_nodes} rollout and {self.train_nodes} training nodes; {COLOCATED}, both phases"
                " run on the same ones"
            )
        if self.colocated and COLOCATED not in self.modes:
            raise UserError(f"{where} it is {COLOCATED}, which is not among its modes: {', '.join(self.modes)}")

    @functools.cached_property
    def in_modes(self) -> tuple[JobSpec, ...]:
        """The job as it would be placed, in each of its modes."""
        return tuple(msgspec.structs.replace(self, colocated=mode == COLOCATED) for mode in self.modes)

    @functools.cached_property
    def placed_as(self) -> tuple[str, bool]:
        """The key of what is remembered about it as it is placed."""
        return self.name, self.colocated

    @property
    def nodes(self) -> tuple[int, int]:
        """Rollout and training nodes that it holds as it is placed."""
        return 0 if self.colocated else self.rollout_nodes, self.train_nodes

    @property
    def memory_gb(self) -> tuple[float, float]:
        """Host memory on each of those."""
        if self.colocated:
            return 0.0, self.rollout_memory_gb + self.train_memory_gb
        return self.rollout_memory_gb, self.train_memory_gb

    @functools.cached_property
    def iteration_s(self) -> float:
        """T_solo: one iteration alone, where no node ever switches."""
        return self.sync_s + self.rollout.seconds + self.train.seconds

    @property
    def load_s(self) -> float:
        """What a move costs in time, without the part of an iteration that it throws away."""
        return self.cold_start_s if self.move_s is None else self.move_s

    @functools.cached_property
    def limit_s(self) -> float:
        """The longest mean iteration its SLO allows."""
        return self.slo * (self.iteration_s if self.solo_s is None else self.solo_s)

    @functools.cached_property
    def rollout_hold_s(self) -> float:
        """Time a rollout holds its nodes, without the switch."""
        return self.sync_s + self.rollout.seconds - self.tail_s

    @functools.cached_property
    def rollout_share(self) -> float:
        """The least part of its rollout nodes' time that it must get to keep within its SLO."""
        return 0.0 if self.colocated else self.rollout_hold_s / self.limit_s

    @functools.cached_property
    def train_share(self) -> float:
        """The same on its training nodes."""
        return self.train_hold_s / self.limit_s

    @property
    def train_hold_s(self) -> float:
        """Time an iteration holds its training nodes, without switches."""
        return self.train.seconds + (self.rollout_hold_s if self.colocated else 0.0)


class Pin(_Value, frozen=True):
    """The nodes that keep a job's state in host memory, so that its phases start warm there. rollout: none if it is colocated."""

    job: JobSpec
    rollout: tuple[str, ...]
    train: tuple[str, ...]

    @property
    def runs_rollouts_on(self) -> tuple[str, ...]:
        """The nodes that its rollouts hold: its training nodes if it is colocated."""
        return self.train if self.job.colocated else self.rollout


class Group(_Value, frozen=True):
    """A co-execution group: jobs that share nodes. `order`: see `ORDERS`."""

    name: str
    pins: tuple[Pin, ...]
    rollout_nodes: tuple[str, ...]
    train_nodes: tuple[str, ...]
    order: str = "fifo"

    @functools.cached_property
    def jobs(self) -> tuple[JobSpec, ...]:
        return tuple(pin.job for pin in self.pins)

    @functools.cached_property
    def rollout_used(self) -> tuple[float, ...]:
        """Shares of time promised on each rollout node, least first."""
        return tuple(sorted(sum(job.rollout_share for job in self.on_rollout(node)) for node in self.rollout_nodes))

    @functools.cached_property
    def train_used(self) -> tuple[float, ...]:
        return tuple(sorted(sum(job.train_share for job in self.on_train(node)) for node in self.train_nodes))

    @functools.cached_property
    def fullness(self) -> float:
        """Share of time promised on the emptiest node of each side, added up; a side without nodes has no room."""
        return sum(used[0] if used else 1.0 for used in (self.rollout_used, self.train_used))

    def usd_per_hour(self, cluster: Cluster) -> float:
        return cluster.usd(len(self.rollout_nodes), len(self.train_nodes))

    def pin_of(self, job: str) -> Pin:
        return next(pin for pin in self.pins if pin.job.name == job)

    def on_rollout(self, node: str) -> tuple[JobSpec, ...]:
        return tuple(pin.job for pin in self.pins if node in pin.rollout)

    def on_train(self, node: str) -> tuple[JobSpec, ...]:
        return tuple(pin.job for pin in self.pins if node in pin.train)


# --- what is decided about a job that came ---

# By whether the newcomer gets new rollout nodes, and new training nodes.
STRATEGIES = {
    (False, False): "direct packing",
    (True, False): "rollout scaling",
    (False, True): "training scaling",
    (True, True): "scaling of both sides",
}
# By whether both phases run on its training nodes.
OWN_NODES = {False: "isolated", True: "colocated"}


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A place that was not taken. group None: nodes of its own, by the strategy `isolated` or `colocated`. usd_per_hour: what it
    would have added; work_usd_per_hour: the same for as much work, where places are compared by that (`Price` in groups.py).
    why: the reason; empty: the job could go there."""

    group: str | None
    strategy: str
    usd_per_hour: float | None
    why: str
    work_usd_per_hour: float | None = None

    @property
    def price(self) -> float:
        """USD per hour by which places are compared, of one that the job could take."""
        return (self.usd_per_hour or 0.0) if self.work_usd_per_hour is None else self.work_usd_per_hour


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """outcome: `placed`, or `queued` in a finite cluster that has no room now. rollout, train: nodes of its phases, the same ones
    if it is colocated. usd_per_hour: added by the job. wait: why it is queued."""

    job: str
    outcome: str
    strategy: str | None = None
    group: str | None = None
    rollout: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    order: str = "fifo"
    usd_per_hour: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    wait: str = ""

    @property
    def was(self) -> tuple[str | None, str | None]:
        """Group and strategy as in an Alternative."""
        return (None if self.strategy in OWN_NODES.values() else self.group), self.strategy


# --- what a placer may do: orders, rules, modes ---
#
# An order ranks the jobs of a group: among waiting phases the lowest rank starts first, equal ranks in order of arrival. Under
# every order a phase starts when all its nodes are free and no phase ahead of it needs one of them.


def _ranked(key: Callable[[JobSpec], float]) -> Callable[[Sequence[JobSpec]], list[int]]:
    def ranks(jobs: Sequence[JobSpec]) -> list[int]:
        keys = [key(job) for job in jobs]
        ordered = sorted(keys)
        return [ordered.index(each) for each in keys]

    return ranks


FIFO = "fifo"
ORDERS: dict[str, Callable[[Sequence[JobSpec]], list[int]]] = {
    # One queue per node, first come first served (the runtime of the RollMux paper).
    FIFO: lambda jobs: [0] * len(jobs),
    # The longest iteration alone goes first: it sets the cycle, the others fit into its bubbles.
    "longest-first": _ranked(lambda job: -job.iteration_s),
    # The least room between the iteration alone and its SLO goes first.
    "tightest-first": _ranked(lambda job: job.limit_s - job.iteration_s),
}


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each part beyond the paper is a switch, so that it can be measured on its own.

    cap: most jobs in a group.
    rollout_scaling, training_scaling: new nodes on one side for a job that shares the other; with the second, also some new nodes
        beside shared ones on both sides.
    colocate: jobs that can run both phases on their training nodes may be placed so; off: only jobs that have no other mode.
    best_fit: among equally cheap places take the fullest, not the oldest.
    guard: check a join on the group as it stands now, over the whole life of its jobs, and not only on its settled periods.
    repack: move jobs where the saving pays for the cold start.
    reach: most jobs that one repack looks at together.
    effort: groups simulated per decision; a repack resumes where it stopped when it is asked for again.
    shortlist: groups looked at per decision.
    max_bypass: younger jobs that may start before a waiting one.
    hysteresis: a saving must pay for its moves this many times.
    moves_per_hour: in all, without moves that rescue an SLO; 0: no limit.
    keep: probability with which all jobs of a group keep their SLOs over ten iterations while phases vary together; 0: phases
        last as estimated.
    count_stays: places are compared by what the same work costs there instead of by the hour (`Price` in groups.py).
    """

    cap: int = 5
    rollout_scaling: bool = True
    training_scaling: bool = True
    colocate: bool = True
    best_fit: bool = True
    guard: bool = True
    repack: bool = True
    reach: int = 8
    effort: int = 16
    shortlist: int = 64
    max_bypass: int = 8
    hysteresis: float = 1.0
    moves_per_hour: int = 0
    keep: float = 0.0
    count_stays: bool = False

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise UserError(f"cap is {self.cap}; a group holds at least 1 job")
        if not self.hysteresis >= 1:
            raise UserError(f"hysteresis is {self.hysteresis:g}; a saving must pay for its moves at least 1 time")
        if not 0 <= self.keep < 1:
            raise UserError(f"keep is {self.keep:g}; a probability of at least 0 and below 1 is needed")


OURS = Rules()
# The rules of the coordinator, and of the policy `live` of `simulate`: moves cost what they take, phases vary, and their lengths
# are not known beforehand. New training nodes beside shared rollout nodes, and the fullest group of equals, pay only where jobs
# are moved afterwards. Even odds over ten iterations are enough: over the hundreds of a job what varies evens out, and what
# drifts is corrected.
LIVE = Rules(training_scaling=False, best_fit=False, effort=256, hysteresis=1.5, moves_per_hour=60, keep=0.5, count_stays=True)


def modes_of(job: JobSpec, cluster: Cluster, rules: Rules) -> list[JobSpec]:
    """The job in each allowed mode in which the empty cluster could hold it."""
    return [placed for placed in allowed(job, rules) if too_large(placed, cluster) is None]


def allowed(job: JobSpec, rules: Rules) -> tuple[JobSpec, ...]:
    """The job in each mode that it can run in and the rules do not exclude."""
    if rules.colocate:
        return job.in_modes
    return tuple(placed for placed in job.in_modes if not placed.colocated) or job.in_modes


def too_large(job: JobSpec, cluster: Cluster) -> str | None:
    """Why the empty cluster cannot hold the job in its present mode; None: it can."""
    pools = (("rollout", cluster.rollout), ("train", cluster.train))
    for (side, pool), need, memory in zip(pools, job.nodes, job.memory_gb, strict=True):
        if need > pool.size:
            return f"job {job.name!r} needs {need} {side} nodes; pool {pool.name!r} has {pool.size}"
        if memory > pool.kind.host_memory_gb:
            return (
                f"job {job.name!r} needs {memory:g} GB of host memory per {side} node;"
                f" a node of pool {pool.name!r} has {pool.kind.host_memory_gb:g}"
            )
    return None


def check_fits(job: JobSpec, cluster: Cluster, rules: Rules) -> None:
    """Raise UserError for a job that the empty cluster could not hold in any of its modes."""
    if not modes_of(job, cluster, rules):
        raise UserError(str(too_large(allowed(job, rules)[0], cluster)))
