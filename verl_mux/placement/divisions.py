"""The cheapest nodes that a set of jobs can share, and the cheapest way to divide jobs into such sets.

Pure; held by a Placer (placer.py), which looks for moves with it, and used by the optimum in research/.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from verl_mux.placement.feasibility import TOLERANCE, Feasibility, Pairs, connected, pairs_of_nodes
from verl_mux.placement.groups import EPSILON_USD, Classes, Price, cheapest_alone, isolated_usd, share
from verl_mux.placement.model import Cluster, JobSpec, NodeKind, Rules, modes_of

EPSILON_NODES = 1e-6

# --- layouts of jobs over interchangeable nodes of one side ---
#
# Nodes with the same occupants form a class. A job takes whole classes, and part of one more at most, and only where it
# asks for no new nodes: taking part of several classes, or a new node while some of a class it shares is left, brings
# the same conflicts or more for the same nodes or more.


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
# (USD per hour, jobs, the mean iteration of each) -> what ways to share are compared by, no less than USD per hour.
PriceOfShared = Callable[[float, Sequence[JobSpec], Sequence[float]], float]


def in_cheapest_modes(jobs: Sequence[JobSpec], cluster: Cluster, rules: Rules, find: Find, below: float) -> SharedNodes | None:
    """The result of `find` under `below` USD per hour for the jobs in the modes in which they then cost the least."""
    modes = itertools.product(*[modes_of(job, cluster, rules) for job in jobs])
    best = None
    for least, placed in sorted([(cluster.usd(*_least_nodes(placed)), placed) for placed in modes], key=lambda way: way[0]):
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
            if (asked := price(usd, jobs, feasibility.seconds(jobs, rollout.pairs, train.pairs))) < below:
                best, below = msgspec.structs.replace(found, price=asked), asked - EPSILON_USD
    return best


def _least_nodes(jobs: Sequence[JobSpec]) -> tuple[int, int]:
    """Per side nodes for the largest job, and node time for the least share of every job: no way to share needs fewer."""
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
    on_rollout, on_train, on_both = feasibility.hopeless_pairs(jobs)
    never = on_rollout & on_train & on_both
    least = _least_nodes(jobs)
    rollout = [(j.nodes[0], j.rollout_share, j.memory_gb[0]) for j in jobs]
    train = [(j.nodes[1], j.train_share, j.memory_gb[1]) for j in jobs]
    rollouts = _fitting(rollout, cluster.rollout.kind, never | on_rollout & on_both, below - cluster.usd(0, least[1]))
    trains = _fitting(train, cluster.train.kind, never | on_train & on_both, below - cluster.usd(least[0], 0)) if rollouts else []
    both = [
        (price, r, t)
        for r in rollouts
        for t in trains
        if (price := cluster.usd(r.nodes, t.nodes)) < below
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


# --- the cheapest way to divide jobs into groups: a dynamic programme over sets of jobs ---
#
# Exact given what `cheapest_nodes` says a group costs, and tractable to about 16 jobs at a time: those costs are remembered,
# so that a job that arrives only adds the sets it is in.
#
# The probability that a group keeps its SLOs takes long to compute. It is asked only for the groups of the division that would be
# cheapest if phases lasted as estimated. Groups that fail are priced anew, and the division is sought again. A group that is
# feasible while phases vary is also feasible while they last, so the result is the one that asking for every group would find.

Part = tuple[tuple[JobSpec, ...], SharedNodes | None]


class OutOfEffort(Exception):
    """The search has used up what it may simulate; what it found so far is remembered."""


class Partitioner:
    """Remembers the cheapest nodes of every set of up to `cap` jobs it met, and the cheapest divisions; `forget` a
    job when it leaves or when its estimates change.

    until: the number of groups (`simulated`) from which on it gives up with OutOfEffort.
    find: the cheapest nodes of jobs in given modes; None: `cheapest_nodes` within what `feasibility` allows."""

    def __init__(self, cluster: Cluster, feasibility: Feasibility, rules: Rules, find: Find | None = None) -> None:
        self.cluster, self.feasibility, self.rules = cluster, feasibility, rules
        price = Price(cluster, rules).of_shared if rules.count_stays else None
        # While phases last as estimated.
        self._lasting = Feasibility() if feasibility.keep and find is None else feasibility
        self._find = find or (lambda jobs, below: cheapest_nodes(jobs, cluster, self._lasting, below, price))
        self._find_sure: Find = lambda jobs, below: cheapest_nodes(jobs, cluster, feasibility, below, price)
        self.until = math.inf
        # By the jobs' names, sorted.
        self._shared: dict[tuple[str, ...], SharedNodes | None] = {}
        self._solved: dict[tuple[str, ...], tuple[float, list[Part]]] = {}
        self._keys: dict[str, list[tuple[str, ...]]] = {}
        self._doubted: set[tuple[str, ...]] = set()  # what they share has to be sure

    def forget(self, name: str) -> None:
        if self._lasting is not self.feasibility:
            self._lasting.forget(name)
        for key in self._keys.pop(name, ()):
            self._shared.pop(key, None)
            self._solved.pop(key, None)
            self._doubted.discard(key)

    def solve(self, jobs: Iterable[JobSpec]) -> tuple[float, list[Part]]:
        """(USD per hour, parts): jobs as they are placed, with the nodes they share, None for a job on nodes of its own."""
        ordered = sorted(jobs, key=lambda job: job.name)
        key = tuple(job.name for job in ordered)
        if key not in self._solved:
            found = _Division(self, ordered).solve()
            while self._corrected(found[1]):
                found = _Division(self, ordered).solve()
            self._solved[key] = found
            self._note(key)
        return self._solved[key]

    @property
    def simulated(self) -> int:
        """Groups so far."""
        return sum(each.simulated for each in {self.feasibility, self._lasting})

    def _corrected(self, parts: Sequence[Part]) -> bool:
        """Whether there are groups among these that do not keep their SLOs as phases vary. They are priced anew when they are met
        again, and so are larger ones, which may have been left out because of them."""
        if self._lasting is self.feasibility:
            return False

        def is_sure(shared: SharedNodes) -> bool:
            return self.feasibility.allows(shared.jobs, pairs_of_nodes(shared.rollout), pairs_of_nodes(shared.train))

        wrong = [shared for _, shared in parts if shared is not None and not is_sure(shared)]
        for key in [tuple([job.name for job in shared.jobs]) for shared in wrong]:
            self._doubted.add(key)
            for larger in [other for other in self._keys[key[0]] if set(key) <= set(other)]:
                self._shared.pop(larger, None)
        return bool(wrong)

    def shared_nodes(self, jobs: Sequence[JobSpec], below: Callable[[], float]) -> SharedNodes | None:
        """`below`: what the jobs cost in the best smaller groups; a group that is not cheaper is of no use. Jobs come
        sorted by name."""
        key = tuple([job.name for job in jobs])
        if key not in self._shared:
            if self.simulated >= self.until:
                raise OutOfEffort
            self._note(key)
            find = self._find_sure if key in self._doubted else self._find
            self._shared[key] = in_cheapest_modes(jobs, self.cluster, self.rules, find, below() - EPSILON_USD)
        return self._shared[key]

    def _note(self, key: tuple[str, ...]) -> None:
        for name in key:
            self._keys.setdefault(name, []).append(key)


class _Division:
    """One run of the programme; sets of jobs are bits, and each group is listed under its lowest job."""

    def __init__(self, owner: Partitioner, jobs: list[JobSpec]) -> None:
        self.owner = owner
        self.jobs = jobs
        self.alone = [cheapest_alone(job, owner.cluster, owner.rules) for job in jobs]
        self.alone_usd = [isolated_usd(job, owner.cluster) for job in self.alone]
        self.groups: list[list[tuple[int, SharedNodes]]] = [[] for _ in jobs]
        self.best: dict[int, tuple[float, int]] = {0: (0.0, 0)}

    def solve(self) -> tuple[float, list[Part]]:
        for low in range(len(self.jobs) - 1, -1, -1):
            self._list_groups(low)
        all_jobs = (1 << len(self.jobs)) - 1
        return self._cheapest(all_jobs)[0], self._read_off(all_jobs)

    def _list_groups(self, low: int) -> None:
        """All groups of use whose lowest job is `low`, small ones first, as larger ones must beat them."""
        owner, jobs = self.owner, self.jobs
        for size in range(1, min(owner.rules.cap, len(jobs))):
            for others in itertools.combinations(range(low + 1, len(jobs)), size):
                members = (low, *others)
                bits = sum([1 << i for i in members])
                if shared := owner.shared_nodes([jobs[i] for i in members], functools.partial(self._least_usd, bits)):
                    self.groups[low].append((bits, shared))

    def _cheapest(self, bits: int) -> tuple[float, int]:
        if bits not in self.best:
            self.best[bits] = self._split(bits)
        return self.best[bits]

    def _least_usd(self, bits: int) -> float:
        return self._split(bits)[0]

    def _split(self, bits: int) -> tuple[float, int]:
        """Lowest cost over the groups listed so far for the lowest job, and that group."""
        low = (bits & -bits).bit_length() - 1
        found = 1 << low
        least = self.alone_usd[low] + self._cheapest(bits ^ found)[0]
        for group, shared in self.groups[low]:
            if group & ~bits == 0:
                usd = shared.price + self._cheapest(bits ^ group)[0]
                if usd < least - EPSILON_USD:
                    least, found = usd, group
        return least, found

    def _read_off(self, bits: int) -> list[Part]:
        parts = []
        while bits:
            group = self.best[bits][1]
            low = (bits & -bits).bit_length() - 1
            shared = dict(self.groups[low]).get(group)
            parts.append((shared.jobs if shared else (self.alone[low],), shared))
            bits ^= group
        return parts
