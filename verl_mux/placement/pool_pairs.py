"""Questions to placement, its record, and the pairs of pools that answer them. Pure."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement.explain import alternatives, cheapest
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.model import Cluster, Group, JobSpec
from verl_mux.placement.placer import Offer, Placer, Waiting, unmoved
from verl_mux.placement.rules import Rules
from verl_mux.placement.search import Alternative, Decision, Move, Revision

# A placer's whole memory as plain data, so that it can be journaled and a placer be made from it again; and what it is asked.


class Arrive(msgspec.Struct, frozen=True, tag=True):
    """Where is this job to go? `pair`, `elsewhere`: as of one that waits."""

    job: JobSpec
    pair: str = ""
    elsewhere: dict[str, JobSpec] = {}


class Leave(msgspec.Struct, frozen=True, tag=True):
    """What follows when this job is gone?"""

    name: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """What follows when nodes can be had again?"""


class Correct(msgspec.Struct, frozen=True, tag=True):
    """What follows when the job, where it is, turns out to be like this?"""

    job: JobSpec


class Vacate(msgspec.Struct, frozen=True, tag=True):
    """Where can those go who are on this node, which nobody is to be on any more?"""

    node: str


class Again(msgspec.Struct, frozen=True, tag=True):
    """Does any move pay by now?"""


Question = Arrive | Leave | Correct | Open | Vacate | Again


class Queued(msgspec.Struct, frozen=True):
    """A job that waits for room. passed: younger jobs that started before it. pair: of pools, in which it is as `job` says, ""
    for the first; elsewhere: as it is in others that could hold it."""

    job: JobSpec
    passed: int = 0
    pair: str = ""
    elsewhere: dict[str, JobSpec] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for the index
    """groups: as they are. waiting: in order of arrival. named: groups that ever were, for the next one's name. moved_at:
    seconds, of the moves of the last hour that count against the limit. version: of changes, so that a placer that was kept knows
    whether it is up to date."""

    groups: tuple[Group, ...] = ()
    waiting: tuple[Queued, ...] = ()
    named: int = 0
    moved_at: tuple[float, ...] = ()
    version: int = 0

    @functools.cached_property
    def by_name(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    @functools.cached_property
    def _home(self) -> dict[str, Group]:
        return {job.name: group for group in self.groups for job in group.jobs}

    @functools.cached_property
    def _queued(self) -> dict[str, JobSpec]:
        return {entry.job.name: entry.job for entry in self.waiting}

    def job(self, name: str) -> JobSpec | None:
        """What was last estimated of a job that is placed or waits."""
        group = self._home.get(name)
        return self._queued.get(name) if group is None else next(job for job in group.jobs if job.name == name)

    def group_of(self, name: str) -> Group | None:
        return self._home.get(name)

    def changed(
        self,
        gone: Iterable[str],
        groups: Iterable[Group],
        waiting: tuple[Queued, ...],
        named: int,
        moved_at: tuple[float, ...],
    ) -> Record:
        """Without the groups `gone`, and with these."""
        left = dict(self.by_name)
        for name in gone:
            left.pop(name, None)
        left.update((group.name, group) for group in groups)
        version = self.version + 1
        return Record(groups=tuple(left.values()), waiting=waiting, named=named, moved_at=moved_at, version=version)


def restore(record: Record, cluster: Cluster, rules: Rules) -> Placer:
    """A placer that goes on where the one of the record was."""
    placer = Placer(cluster, rules)
    placer.adopt(record.groups, record.named, record.moved_at)
    for entry in record.waiting:
        placer.waiting.add(entry.job, entry.passed)
    return placer


# Several pairs of a rollout and a training pool, each with a placer of its own. A pool may be in more than one of them.
#
# Whoever comes has estimates for each pair that could hold it, as phases last otherwise on other kinds of GPUs. It goes where as
# much of its work costs the least, of all pairs at once or, if it has to wait, of those that have room then; and stays in that
# pair: moves are within one. Nodes that the groups of one pair hold are closed to the others.


class PoolPairs:
    """clusters: by name of the pair, the first one first. closed: nodes that nobody new is placed on. waiting, named, moved_at:
    as of a record. touched: names of groups that changed, came or went. held, ranks, shares: as placers have them."""

    def __init__(self, clusters: Mapping[str, Cluster], rules: Rules, record: Record, closed: frozenset[str]) -> None:
        self.clusters, self.rules, self.closed = dict(clusters), rules, closed
        self.waiting = list(record.waiting)
        self.named, self.moved_at = record.named, list(record.moved_at)
        self.touched: set[str] = set()
        self.held: frozenset[str] = frozenset()
        self.ranks: Mapping[str, int] = {}
        self.shares: Mapping[str, float] = {}
        self._first = next(iter(self.clusters))
        sides = {pair: {cluster.rollout.name, cluster.train.name} for pair, cluster in self.clusters.items()}
        # Those that have a pool in common with it, itself among them.
        self._beside = {pair: {other for other in sides if sides[pair] & sides[other]} for pair in sides}
        self._pools = {pair: cluster.rollout.names | cluster.train.names for pair, cluster in self.clusters.items()}
        groups: dict[str, list[Group]] = {pair: [] for pair in self.clusters}
        for group in record.groups:
            groups[pair_of(group.rollout_nodes, group.train_nodes, self.clusters)].append(group)
        self._nodes = {pair: _held(its) for pair, its in groups.items()}
        self._placers = {pair: self._made(pair, its) for pair, its in groups.items()}

    # --- what there is ---

    @property
    def record(self) -> Record:
        return Record(
            groups=tuple(group for placer in self._placers.values() for group in placer.groups.values()),
            waiting=tuple(self.waiting),
            named=self.named,
            moved_at=tuple(self.moved_at),
        )

    def group(self, name: str) -> Group | None:
        return next((placer.groups[name] for placer in self._placers.values() if name in placer.groups), None)

    def home(self, job: str) -> str | None:
        """The pair in which the job is placed."""
        return next((pair for pair, placer in self._placers.items() if job in placer.groups.home), None)

    def waits(self, job: str) -> bool:
        return any(entry.job.name == job for entry in self.waiting)

    @property
    def pending(self) -> bool:
        return any(placer.pending for placer in self._placers.values())

    # --- what is asked, as of a placer ---

    def ways(self, specs: Mapping[str, JobSpec], most: int) -> dict[str, list[Alternative]]:
        """Where the job could go, by pair. specs: the job in each of them."""
        return {pair: alternatives(self._up_to_date(pair), spec, most) for pair, spec in specs.items()}

    def admit(self, specs: Mapping[str, JobSpec], order: Iterable[str], progress: Mapping[str, Progress]) -> tuple[str, Decision]:
        """Into the first of these pairs that takes the job now; else it waits, in all. Raises UserError for a name in use."""
        (first, job), *others = specs.items()
        if self.home(job.name) is not None or self.waits(job.name):
            raise UserError(f"job {job.name!r} is placed or waiting already; job names are unique")
        refused: list[tuple[str, Decision]] = []
        for pair in order:
            with self.of(pair) as placer:
                decision = placer.admit(specs[pair], progress)
                if decision.outcome == "placed":
                    return pair, decision
                placer.waiting.remove(decision.job)
            refused.append((pair, decision))
        self.waiting.append(Queued(job, pair="" if first == self._first else first, elsewhere=dict(others)))
        return refused[0]

    def depart(self, name: str, progress: Mapping[str, Progress], now: float) -> list[Move]:
        """Nothing, where it is not there."""
        blocked = self._overdue()
        self.waiting = [entry for entry in self.waiting if entry.job.name != name]
        home = self.home(name)
        if home is None:
            return self.start_waiting(progress) if name in blocked.values() else []
        with self._taken(home) as placer:
            moves = placer.drop(name, progress)
        return moves + self._follow(home, unmoved(progress, moves), now)

    def revise(self, job: JobSpec, progress: Mapping[str, Progress], now: float) -> Revision:
        """Nothing, where it is not placed."""
        home = self.home(job.name)
        if home is None:
            return Revision()
        with self._taken(home) as placer:
            done = placer.correct(job, progress)
        return Revision((*done.moves, *self._follow(home, unmoved(progress, done.moves), now)), done.actions)

    def vacate(self, node: str, progress: Mapping[str, Progress]) -> list[Move]:
        moves: list[Move] = []
        for pair in [pair for pair, nodes in self._pools.items() if node in nodes]:
            with self._taken(pair) as placer:
                moves += placer.vacate(node, progress)
        return moves + (self.start_waiting(unmoved(progress, moves)) if moves else [])

    def repack(self, progress: Mapping[str, Progress], now: float) -> list[Move]:
        moves: list[Move] = []
        for pair in self.clusters:
            with self._taken(pair) as placer:
                moves += placer.repack(progress, now)
        return moves + (self.start_waiting(unmoved(progress, moves)) if moves else [])

    def start_waiting(self, progress: Mapping[str, Progress]) -> list[Move]:
        """Who waits and now has room, one after the other."""
        moves: list[Move] = []
        while self.waiting and (started := self._start_one(progress)):
            moves.append(started)
        return moves

    def _follow(self, pair: str, progress: Mapping[str, Progress], now: float) -> list[Move]:
        """Who starts when something has changed in the pair, and then whose move would save something there."""
        started = self.start_waiting(progress)
        with self._taken(pair) as placer:
            moved = placer.repack(progress, now)
        return started + moved + (self.start_waiting(unmoved(progress, moved)) if moved else [])

    # --- who waits ---

    def _start_one(self, progress: Mapping[str, Progress]) -> Move | None:
        blocked = self._overdue()
        for entry in self._in_line():
            offers: dict[str, tuple[JobSpec, Offer]] = {}
            for pair in [pair for pair in self.clusters if blocked.get(pair, entry.job.name) == entry.job.name]:
                spec = self._spec(entry, pair)
                if spec is not None and (offer := self._up_to_date(pair).offer(spec, progress)):
                    offers[pair] = spec, offer
            if offers:
                return self._start(entry, offers)
        return None

    def _start(self, entry: Queued, offers: Mapping[str, tuple[JobSpec, Offer]]) -> Move:
        """In the pair in which its work costs the least; who came before it and could have had a node there was passed."""
        pair = min(offers, key=lambda pair: offers[pair][1].usd * offers[pair][0].iteration_s)
        with self._taken(pair) as placer:
            move = placer.start(*offers[pair])
        at = self.waiting.index(entry)
        passed = [
            msgspec.structs.replace(other, passed=other.passed + 1) if self._concerns(other, pair) else other
            for other in self.waiting[:at]
        ]
        self.waiting = [*passed, *self.waiting[at + 1 :]]
        return move

    def _in_line(self) -> list[Queued]:
        """Who waits, first who goes first."""
        usd: dict[str, float] = defaultdict(float)
        for placer in self._placers.values():
            for owner, held in placer.usd_by_owner().items():
                usd[owner] += held
        line = Waiting(max_bypass=sys.maxsize)
        line.refill((entry.job, entry.passed) for entry in self.waiting)
        line.ranks, line.shares = self.ranks, self.shares
        entries = {entry.job.name: entry for entry in self.waiting}
        return [entries[job.name] for job in line.candidates(usd)]

    def _overdue(self) -> dict[str, str]:
        """By pair, the oldest job that nobody may pass any more there."""
        late = [entry for entry in self.waiting if entry.passed >= self.rules.max_bypass]
        first = {pair: next((entry for entry in late if self._concerns(entry, pair)), None) for pair in self.clusters}
        return {pair: entry.job.name for pair, entry in first.items() if entry is not None}

    def _concerns(self, entry: Queued, pair: str) -> bool:
        """Whether it waits for nodes of a pool that the pair has."""
        return not self._beside[pair].isdisjoint([entry.pair or self._first, *entry.elsewhere])

    # --- one of the placers ---

    @contextlib.contextmanager
    def of(self, pair: str) -> Iterator[Placer]:
        """The placer of the pair as all of them stand, with who waits for nodes of its pools, whom it is not to start; what it
        does is taken over."""
        waiting = [entry for entry in self.waiting if self._concerns(entry, pair)]
        with self._taken(pair) as placer:
            placer.waiting.refill((self._spec(entry, pair) or entry.job, entry.passed) for entry in waiting)
            yield placer
            passed = {job.name: passed for job, passed in placer.waiting.entries}
            placer.waiting.refill(())
        self.waiting = [msgspec.structs.replace(entry, passed=passed.get(entry.job.name, entry.passed)) for entry in self.waiting]

    @contextlib.contextmanager
    def _taken(self, pair: str) -> Iterator[Placer]:
        """The same without who waits."""
        placer = self._up_to_date(pair)
        placer.groups.named, placer.moved_at = self.named, self.moved_at
        yield placer
        self.named, self.moved_at = placer.groups.named, placer.moved_at
        if placer.groups.touched:
            self.touched |= placer.groups.touched
            placer.groups.touched.clear()
            if len(self.clusters) > 1:
                self._nodes[pair] = _held(placer.groups.values())

    def _spec(self, entry: Queued, pair: str) -> JobSpec | None:
        return entry.job if pair == (entry.pair or self._first) else entry.elsewhere.get(pair)

    def _up_to_date(self, pair: str) -> Placer:
        placer = self._placers[pair]
        if placer.cluster.closed != self._closed_to(pair):
            placer = self._placers[pair] = self._made(pair, list(placer.groups.values()))
        placer.search.held = self.held
        return placer

    def _closed_to(self, pair: str) -> frozenset[str]:
        others = [nodes & self._pools[pair] for other, nodes in self._nodes.items() if other != pair]
        return self.closed.union(*others)

    def _made(self, pair: str, groups: Sequence[Group]) -> Placer:
        cluster = msgspec.structs.replace(self.clusters[pair], closed=self._closed_to(pair))
        return restore(Record(groups=tuple(groups), named=self.named, moved_at=tuple(self.moved_at)), cluster, self.rules)


def by_price(specs: Mapping[str, JobSpec], ways: Mapping[str, Sequence[Alternative]]) -> dict[str, float]:
    """USD per hour of as much of the job's work as the first pair does alone in an hour, at the cheapest place of each pair,
    lowest first; infinite where there is none now."""
    first = next(iter(specs.values()))
    usd = {pair: cheapest(places) * specs[pair].iteration_s / first.iteration_s for pair, places in ways.items()}
    return dict(sorted(usd.items(), key=lambda found: (found[1], specs[found[0]].iteration_s)))


def pair_of(rollout: Iterable[str], train: Iterable[str], clusters: Mapping[str, Cluster]) -> str:
    """The first pair whose pools have these nodes, or most of them: some may have left their pool while jobs are there."""
    rollout, train = set(rollout), set(train)

    def has(pair: str) -> int:
        cluster = clusters[pair]
        return len(rollout & cluster.rollout.names) + len(train & cluster.train.names)

    return max(clusters, key=has)


def _held(groups: Iterable[Group]) -> frozenset[str]:
    return frozenset(node for group in groups for node in (*group.rollout_nodes, *group.train_nodes))
