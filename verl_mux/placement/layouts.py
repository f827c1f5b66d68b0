"""Ways to lay jobs over nodes, the cheapest nodes that a set of jobs can share, and the price by which they are compared.

Pure; used by groups.py, repack.py, placer.py, explain.py and the optimum in research/.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from verl_mux.placement.feasibility import TOLERANCE, Feasibility, Pairs, connected, pairs_of_nodes
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.model import Cluster, Group, JobSpec, NodeKind, Rules, modes_of

EPSILON_USD = 1e-6
EPSILON_NODES = 1e-6

# --- layouts of jobs over interchangeable nodes of one side ---
#
# Nodes with the same occupants form a class. A job takes whole classes, and part of one more at most, and only where it
# asks for no new nodes: taking part of several classes, or a new node while some of a class it shares is left, brings
# the same conflicts or more for the same nodes or more.

# Nodes with the same occupants: (bits of the jobs on them, number of such nodes).
Classes = tuple[tuple[int, int], ...]


class Layout(msgspec.Struct, frozen=True):
    """nodes: their number. occupied: the different sets of jobs (bits) that share a node. on: nodes (bits) of each job.
    pairs: jobs that share a node."""

    nodes: int
    occupied: tuple[int, ...]
    on: tuple[int, ...]
    pairs: Pairs


@functools.lru_cache(maxsize=4096)
def layouts(needs: tuple[int, ...]) -> tuple[Layout, ...]:
    """Every layout of jobs that need that many nodes each, fewest nodes first, none twice up to renaming nodes."""
    order = sorted(range(len(needs)), key=lambda job: -needs[job])
    return by_nodes(set(_lay((), needs, order)), len(needs))


def by_nodes(found: Iterable[Classes], jobs: int) -> tuple[Layout, ...]:
    """These classes of `jobs` jobs as layouts, fewest nodes first."""
    return tuple(_layout(classes, jobs) for classes in sorted(found, key=lambda each: (sum(count for _, count in each), each)))


def _lay(classes: Classes, needs: tuple[int, ...], order: list[int]) -> Iterator[Classes]:
    if not order:
        yield classes
        return
    job, *rest = order
    for shared, left in share(classes, 1 << job, needs[job]):
        new = shared + (((1 << job, left),) if left else ())
        yield from _lay(tuple(sorted(new)), needs, rest)


def share(classes: Classes, bit: int, need: int) -> Iterator[tuple[Classes, int]]:
    """Every way to put the job on 0..need of the existing nodes: (classes afterwards, nodes it still needs)."""
    everywhere = range(len(classes))
    for size in range(len(classes) + 1):
        for whole in itertools.combinations(everywhere, size):
            left = need - sum(classes[i][1] for i in whole)
            if left >= 0:
                shared = tuple((o | bit, n) if i in whole else (o, n) for i, (o, n) in enumerate(classes))
                yield shared, left
                yield from _share_part(shared, bit, left, [i for i in everywhere if i not in whole])


def _share_part(classes: Classes, bit: int, need: int, open_to: list[int]) -> Iterator[tuple[Classes, int]]:
    for i in open_to if need else ():
        occupants, count = classes[i]
        if count > need:
            parts = ((occupants | bit, need), (occupants, count - need))
            yield (*classes[:i], *parts, *classes[i + 1 :]), 0


def _layout(classes: Classes, jobs: int) -> Layout:
    nodes = [occupants for occupants, count in classes for _ in range(count)]
    bits = [sum(1 << node for node, occupants in enumerate(nodes) if occupants >> job & 1) for job in range(jobs)]
    return Layout(len(nodes), tuple(sorted(set(nodes))), tuple(bits), pairs_of_nodes(bits))


def fits_on_node(sizes: Sequence[tuple[float, float]], kind: NodeKind) -> list[bool]:
    """By the jobs on a node as bits: whether their shares of its time and their states in its host memory both have room there.
    sizes: (share of time, GB) of each job."""
    sums = [(0.0, 0.0)]
    for time, gb in sizes:
        sums += [(t + time, g + gb) for t, g in sums]
    return [time <= TOLERANCE and gb <= kind.host_memory_gb for time, gb in sums]


# --- the cheapest nodes for a set of jobs ---


class SharedNodes(msgspec.Struct, frozen=True):
    """The jobs as they are placed; USD per hour; nodes per side; for each job its nodes of each side as bits; the
    price by which ways to share are compared."""

    jobs: tuple[JobSpec, ...]
    usd_per_hour: float
    rollout_nodes: int
    train_nodes: int
    rollout: tuple[int, ...]
    train: tuple[int, ...]
    price: float


# (jobs as they are placed, sorted by name, USD per hour that it must stay below) -> the cheapest nodes that they can share.
Find = Callable[[Sequence[JobSpec], float], SharedNodes | None]
# (nodes, mean iteration of each job there) -> what ways to share are compared by, no less than USD per hour.
PriceOfShared = Callable[[SharedNodes, Sequence[float]], float]


def isolated_usd(job: JobSpec, cluster: Cluster) -> float:
    """USD per hour of nodes of its own, as it is placed."""
    rollout, train = job.nodes
    return rollout * cluster.rollout.kind.usd_per_hour + train * cluster.train.kind.usd_per_hour


def cheapest_alone(job: JobSpec, cluster: Cluster, rules: Rules) -> JobSpec:
    """The job in the mode in which nodes of its own cost the least."""
    return min(modes_of(job, cluster, rules), key=lambda placed: isolated_usd(placed, cluster))


def in_cheapest_modes(jobs: Sequence[JobSpec], cluster: Cluster, rules: Rules, find: Find, below: float) -> SharedNodes | None:
    """The result of `find` under `below` USD per hour for the jobs in the modes in which they then cost the least."""
    modes = itertools.product(*[modes_of(job, cluster, rules) for job in jobs])
    best = None
    for least, placed in sorted([(_least_usd(placed, cluster), placed) for placed in modes], key=lambda way: way[0]):
        if least >= below:
            break
        if (found := find(placed, below)) is not None:
            best, below = found, found.price - EPSILON_USD
    return best


def cheapest_nodes(
    jobs: Sequence[JobSpec],
    cluster: Cluster,
    feasibility: Feasibility,
    below: float = math.inf,
    price: PriceOfShared | None = None,
) -> SharedNodes | None:
    """The cheapest way for `jobs` as they are placed, sorted by name, to share nodes as one group under `below` USD per hour,
    within every SLO and the nodes' host memory. price None: ways are compared by USD per hour.

    Layouts over both sides are tried cheapest first. Left out are those that some departure would spoil: first those in which two
    jobs share what they could not share on their own. (One side may be hopeless and *both* feasible: the jobs then keep in step.)
    """
    best = None
    for usd, rollout, train in _by_price(jobs, cluster, feasibility, below):
        if usd >= below:
            break
        if feasibility.allows(jobs, rollout.pairs, train.pairs):
            found = SharedNodes(tuple(jobs), usd, rollout.nodes, train.nodes, rollout.on, train.on, usd)
            if price is None:
                return found
            if (asked := price(found, feasibility.seconds(jobs, rollout.pairs, train.pairs))) < below:
                best, below = msgspec.structs.replace(found, price=asked), asked - EPSILON_USD
    return best


def _least_usd(jobs: Sequence[JobSpec], cluster: Cluster) -> float:
    """No way to share costs less."""
    rollout, train = _least_nodes(jobs)
    return rollout * cluster.rollout.kind.usd_per_hour + train * cluster.train.kind.usd_per_hour


def _least_nodes(jobs: Sequence[JobSpec]) -> tuple[int, int]:
    """Per side nodes for the largest job, and node time for the least share of every job."""
    rollout = train = 0.0
    most = [0, 0]
    for job in jobs:
        held, trained = job.nodes
        rollout += held * job.rollout_share
        train += trained * job.train_share
        most = [max(most[0], held), max(most[1], trained)]
    return max(most[0], math.ceil(rollout - 1e-6)), max(most[1], math.ceil(train - 1e-6))


def _by_price(
    jobs: Sequence[JobSpec], cluster: Cluster, feasibility: Feasibility, below: float
) -> list[tuple[float, Layout, Layout]]:
    """Layouts of both sides under `below`, cheapest first, that make one group and in which no two jobs clash."""
    usd = cluster.rollout.kind.usd_per_hour, cluster.train.kind.usd_per_hour
    on_rollout, on_train, on_both = feasibility.hopeless_pairs(jobs)
    never = on_rollout & on_train & on_both
    least = [nodes * each for nodes, each in zip(_least_nodes(jobs), usd, strict=True)]
    rollout = [(j.nodes[0], j.rollout_share, j.memory_gb[0]) for j in jobs]
    train = [(j.nodes[1], j.train_share, j.memory_gb[1]) for j in jobs]
    rollouts = _fitting(rollout, cluster.rollout.kind, never | on_rollout & on_both, below - least[1])
    trains = _fitting(train, cluster.train.kind, never | on_train & on_both, below - least[0]) if rollouts else []
    both = [
        (price, r, t)
        for r in rollouts
        for t in trains
        if (price := r.nodes * usd[0] + t.nodes * usd[1]) < below
        and not (r.pairs & t.pairs & on_both or r.pairs & ~t.pairs & on_rollout or t.pairs & ~r.pairs & on_train)
        and len(connected(r.pairs | t.pairs, len(jobs))) == 1
    ]
    return sorted(both, key=lambda found: found[0])


def _fitting(sizes: Sequence[tuple[int, float, float]], kind: NodeKind, hopeless: Pairs, below: float) -> list[Layout]:
    """Layouts of nodes for at most `below` USD per hour, on each of which the jobs fit, and no `hopeless` pair shares one.
    sizes: (nodes, share of their time, GB on each) of each job."""
    fits = fits_on_node([(time, gb) for _, time, gb in sizes], kind)
    most = below / kind.usd_per_hour + EPSILON_NODES if kind.usd_per_hour else math.inf
    found = []
    for layout in layouts(tuple([nodes for nodes, _, _ in sizes])):
        if layout.nodes > most:  # fewest nodes come first
            break
        if not layout.pairs & hopeless and all([fits[jobs] for jobs in layout.occupied]):
            found.append(layout)
    return found


class Price:
    """What shared nodes are compared by: USD per hour; by the rule `count_stays` USD for what the jobs would do alone in an hour.

    Jobs that take longer on shared nodes stay longer, so in the long run more of them are there at a time, and more nodes. A
    place for two at half the price each saves nothing if both take twice as long on it, as on nodes that one of them kept busy.
    """

    def __init__(self, cluster: Cluster, rules: Rules) -> None:
        self._cluster, self._count_stays = cluster, rules.count_stays

    def of_group(self, group: Group) -> float:
        """USD per hour, or per hour of work."""
        usd = group.usd_per_hour(self._cluster)
        if not self._count_stays or len(group.pins) < 2:
            return usd
        jobs, periods = sorted(group.jobs, key=lambda job: job.name), group_periods(group)
        return usd * self._slower(jobs, [periods[job.name] for job in jobs])

    def of_shared(self, shared: SharedNodes, seconds: Sequence[float]) -> float:
        """The same of nodes yet to be taken. seconds: the mean iteration of each job there."""
        return shared.usd_per_hour * self._slower(shared.jobs, seconds)

    def _slower(self, jobs: Sequence[JobSpec], seconds: Sequence[float]) -> float:
        """By how much the jobs take longer than alone, on the mean weighted by what each costs alone."""
        usd = [isolated_usd(job, self._cluster) for job in jobs]
        if not any(usd):
            usd = [1.0] * len(jobs)  # on nodes that cost nothing they count alike
        return sum(u * s / job.iteration_s for u, s, job in zip(usd, seconds, jobs, strict=True)) / sum(usd)
