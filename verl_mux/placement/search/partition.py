"""The cheapest way to divide jobs into co-execution groups: a dynamic programme over sets of jobs.

Exact given what cheapest_nodes.py says a group costs, and tractable to about 16 jobs at a time: those costs are remembered,
so that a job that arrives only adds the sets it is in.

With what probability a group keeps its SLOs is asked only of the groups of the division that would be cheapest if phases lasted
as estimated: the answer takes long, and few of the groups that are listed are ever chosen. Those that do not keep them are priced
anew by what does, and the division is sought again. Where phases vary nothing is feasible that is not where they last, so the
division found in the end is the one that asking of every group would have found.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from verl_mux.placement.model import Cluster, JobSpec
from verl_mux.placement.search.cheapest_nodes import (
    EPSILON_USD,
    Find,
    SharedNodes,
    cheapest_alone,
    cheapest_nodes,
    in_cheapest_modes,
    isolated_usd,
)
from verl_mux.placement.search.price import Price
from verl_mux.placement.search.rules import Rules
from verl_mux.placement.time.conflicts import pairs_of_nodes
from verl_mux.placement.time.feasibility import Feasibility

Part = tuple[tuple[JobSpec, ...], SharedNodes | None]


class OutOfEffort(Exception):
    """The search has used up what it may simulate; what it found so far is remembered."""


class Partitioner:
    """Remembers the cheapest nodes of every set of up to `cap` jobs it met, and the cheapest divisions; `forget` a
    job when it leaves or when its estimates change.

    until: the number of groups (`simulated`) from which on it gives up with OutOfEffort.
    find: what jobs in given modes cost; None: as cheapest_nodes.py has it, within what `feasibility` allows."""

    def __init__(self, cluster: Cluster, feasibility: Feasibility, rules: Rules, find: Find | None = None) -> None:
        self.cluster = cluster
        self.feasibility = feasibility
        self.rules = rules
        price = Price(cluster, rules).of_shared if rules.count_stays else None
        # While phases last as estimated.
        self._lasting = Feasibility(feasibility.orders) if feasibility.keep and find is None else feasibility
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
        return self.feasibility.simulated + (0 if self._lasting is self.feasibility else self._lasting.simulated)

    def _corrected(self, parts: Sequence[Part]) -> bool:
        """Whether there are groups among these that do not keep their SLOs as phases vary. They are priced anew when they are met
        again, and so are larger ones, which may have been left out because of them."""
        if self._lasting is self.feasibility:
            return False
        wrong = [shared for _, shared in parts if shared is not None and not self._is_sure(shared)]
        for key in [tuple([job.name for job in shared.jobs]) for shared in wrong]:
            self._doubted.add(key)
            for larger in [other for other in self._keys[key[0]] if set(key) <= set(other)]:
                self._shared.pop(larger, None)
        return bool(wrong)

    def _is_sure(self, shared: SharedNodes) -> bool:
        on = pairs_of_nodes(shared.rollout), pairs_of_nodes(shared.train)
        return self.feasibility.order(shared.jobs, *on) == shared.order

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
        everybody = (1 << len(self.jobs)) - 1
        usd, _ = self._cheapest(everybody)
        return usd, self._read_off(everybody)

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
