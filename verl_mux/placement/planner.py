"""The entry of placement: takes a question (a job arrives, leaves, is other than estimated; nodes came free) and answers with
decisions and reasons.

Pure. Called by the coordinator's placement thread, `verl-mux plan`, and the simulation and the paper's re-run in research/.

There may be several pairs of a rollout and a training pool, each with a Placer of its own; a pool may be in more than one of
them. A job that arrives has estimates for each pair that could hold it, as phases last otherwise on other kinds of GPUs. It goes
where
as much of its work costs the least, of all pairs at once or, if it has to wait, of those that have room then; and stays in that
pair: moves are within one. Nodes that the groups of one pair hold are closed to the others.

In a finite cluster jobs wait in order of arrival. Younger jobs may pass a waiting one where it does not fit and they do; but
after `max_bypass` of them no other job starts before it in its pools: what comes free is kept for it. So every job that fits the
empty
cluster starts, if running jobs end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement import explain
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.model import Cluster, Group, JobSpec
from verl_mux.placement.placer import Offer, Placer, unmoved
from verl_mux.placement.rules import OURS, Rules, check_fits
from verl_mux.placement.search import Action, Alternative, Decision, Move, Revision, decision_for

NOTHING_KNOWN: Mapping[str, Progress] = {}
# After this time it is worth asking again about moves that do not pay yet.
ASK_AGAIN_S = 120.0

# --- questions, answers, and the record between them: plain data that can be journaled ---


class Arrive(msgspec.Struct, frozen=True, tag=True):
    """Where is this job to go? pair, elsewhere: as of a waiting job (`Queued`)."""

    job: JobSpec
    pair: str = ""
    elsewhere: dict[str, JobSpec] = {}


class Leave(msgspec.Struct, frozen=True, tag=True):
    """What follows when this job is gone?"""

    name: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """What follows when nodes are available again?"""


class Correct(msgspec.Struct, frozen=True, tag=True):
    """What follows when the job, where it is, turns out to be like this?"""

    job: JobSpec


class Vacate(msgspec.Struct, frozen=True, tag=True):
    """Where can the jobs go that are on this node, which is to be emptied?"""

    node: str


class Again(msgspec.Struct, frozen=True, tag=True):
    """Does any move pay by now?"""


Question = Arrive | Leave | Correct | Open | Vacate | Again


class Answer(msgspec.Struct, frozen=True):
    """moves: jobs that start or move. actions: what was done for SLOs at risk. decision: about the job that arrived, with the
    alternatives; spec: that job as it was decided on; because: the reason, the end of a sentence."""

    moves: tuple[Move, ...] = ()
    actions: tuple[Action, ...] = ()
    decision: Decision | None = None
    spec: JobSpec | None = None
    because: str = ""


class Queued(msgspec.Struct, frozen=True):
    """A job that waits for room. passed: younger jobs that started before it. pair: of pools, in which it is as `job` says, ""
    for the first; elsewhere: as it is in others that could hold it."""

    job: JobSpec
    passed: int = 0
    pair: str = ""
    elsewhere: dict[str, JobSpec] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for the index
    """The whole memory of a planner. groups: as they are. waiting: in order of arrival. named: groups that were ever named, for
    the next one's name. moved_at: seconds, of the moves of the last hour that count against the limit. version: number of
    changes, so
    that a kept planner can be compared with it."""

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
        """The last estimates of a job that is placed or waits."""
        group = self._home.get(name)
        return self._queued.get(name) if group is None else group.pin_of(name).job

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


# --- the planner ---


class Planner:
    """clusters: by name of the pair, the first one first. closed: nodes on which no further job is placed. waiting, named,
    moved_at: as of a record. touched: names of groups that changed, came or went. held: jobs that may not be moved now."""

    def __init__(
        self, clusters: Mapping[str, Cluster], rules: Rules, record: Record | None = None, closed: frozenset[str] = frozenset()
    ) -> None:
        record = record or Record()
        self.clusters, self.rules, self.closed = dict(clusters), rules, closed
        self.waiting = list(record.waiting)
        self.named, self.moved_at = record.named, list(record.moved_at)
        self.touched: set[str] = set()
        self.held: frozenset[str] = frozenset()
        self._first = next(iter(self.clusters))
        sides = {pair: {cluster.rollout.name, cluster.train.name} for pair, cluster in self.clusters.items()}
        # The pairs that have a pool in common with a pair, itself among them.
        self._beside = {pair: {other for other in sides if sides[pair] & sides[other]} for pair in sides}
        self._pools = {pair: cluster.rollout.names | cluster.train.names for pair, cluster in self.clusters.items()}
        groups: dict[str, list[Group]] = {pair: [] for pair in self.clusters}
        for group in record.groups:
            groups[pair_of(group.rollout_nodes, group.train_nodes, self.clusters)].append(group)
        self._nodes = {pair: _held(there) for pair, there in groups.items()}
        self._placers = {pair: self._made(pair, there) for pair, there in groups.items()}

    @classmethod
    def of_one(cls, cluster: Cluster, rules: Rules = OURS) -> Planner:
        """An empty planner of one pair of pools."""
        return cls({"": cluster}, rules, closed=cluster.closed)

    # --- what there is ---

    @property
    def placer(self) -> Placer:
        """Of the first pair."""
        return self._up_to_date(self._first)

    @property
    def groups(self) -> Mapping[str, Group]:
        """Of all pairs, by name."""
        if len(self._placers) == 1:
            return self._placers[self._first].groups
        return {name: group for placer in self._placers.values() for name, group in placer.groups.items()}

    @property
    def record(self) -> Record:
        return Record(
            groups=tuple(self.groups.values()), waiting=tuple(self.waiting), named=self.named, moved_at=tuple(self.moved_at)
        )

    def home(self, job: str) -> str | None:
        """The pair in which the job is placed."""
        return next((pair for pair, placer in self._placers.items() if job in placer.groups.home), None)

    def waits(self, job: str) -> bool:
        return any(entry.job.name == job for entry in self.waiting)

    @property
    def pending(self) -> bool:
        """Whether moves are in view that may pay later."""
        return any(placer.pending for placer in self._placers.values())

    # --- questions ---

    def answer(self, question: Question, progress: Mapping[str, Progress], now: float, most: int | None = None) -> Answer:
        """now: seconds of any clock. most: of more groups than this, only the nearest are explained as alternatives."""
        if isinstance(question, Arrive):
            return self._arrive({question.pair or self._first: question.job, **question.elsewhere}, progress, most)
        if isinstance(question, Correct):
            revision = self.revise(question.job, progress, now)
            return Answer(revision.moves, revision.actions)
        if isinstance(question, Leave):
            moves = self.depart(question.name, progress, now)
        elif isinstance(question, Vacate):
            moves = self.vacate(question.node, progress)
        elif isinstance(question, Open):
            moves = self.start_waiting(progress)
        else:
            moves = self.repack(progress, now)
        return Answer(tuple(moves))

    def _arrive(self, specs: Mapping[str, JobSpec], progress: Mapping[str, Progress], most: int | None) -> Answer:
        could = {pair: explain.alternatives(self._up_to_date(pair), spec, most) for pair, spec in specs.items()}
        usd = by_price(specs, could)
        best = next(iter(usd))
        found = explain.advice(self._up_to_date(best), specs[best], could[best], most)
        pair, decision = self._admit(specs, usd, progress)
        lost = explain.lost_to(decision, could[pair]) + explain.lost_elsewhere(pair, could, usd)
        because = explain.because(decision, specs[pair], could[pair], found if pair == best else None)
        decision = msgspec.structs.replace(decision, alternatives=tuple(lost))
        return Answer(decision=decision, spec=specs[pair], because=because + explain.in_other_pairs(pair, usd))

    def admit(self, job: JobSpec, progress: Mapping[str, Progress] = NOTHING_KNOWN) -> Decision:
        """Place the job in the first pair, or queue it. Raises UserError for a name in use and for a job that the empty cluster
        cannot hold."""
        return self._admit({self._first: job}, [self._first], progress)[1]

    def _admit(
        self, specs: Mapping[str, JobSpec], order: Iterable[str], progress: Mapping[str, Progress]
    ) -> tuple[str, Decision]:
        """Into the first of these pairs that takes the job now; else it waits, in all."""
        (first, job), *others = specs.items()
        blocked, refused = self._overdue(), []
        for pair in order:
            check_fits(specs[pair], self.clusters[pair], self.rules)
            if self.home(job.name) is not None or self.waits(job.name):
                raise UserError(f"job {job.name!r} is placed or waiting already; job names are unique")
            wait = f"job {blocked[pair]!r} waits longer and is next" if pair in blocked else "no room within everybody's SLO"
            with self._taken(pair) as placer:
                before = placer.groups.usd_per_hour
                if pair not in blocked and (offer := placer.offer(specs[pair], progress)):
                    group = placer.take(offer)
                    self.waiting = self._passed(self.waiting, pair)
                    return pair, decision_for(group, placer.groups.usd_per_hour - before)
            refused.append((pair, Decision(job=job.name, outcome="queued", wait=wait)))
        self.waiting.append(Queued(job, pair="" if first == self._first else first, elsewhere=dict(others)))
        return refused[0]

    def depart(self, name: str, progress: Mapping[str, Progress] = NOTHING_KNOWN, now: float = 0.0) -> list[Move]:
        """Drop the job and the nodes on which it was alone. Returns the jobs that start or move in consequence; nothing, where it
        is not there."""
        blocked = self._overdue()
        self.waiting = [entry for entry in self.waiting if entry.job.name != name]
        home = self.home(name)
        if home is None:
            return self.start_waiting(progress) if name in blocked.values() else []
        with self._taken(home) as placer:
            moves = placer.drop(name, progress)
        return moves + self._follow(home, unmoved(progress, moves), now)

    def revise(self, job: JobSpec, progress: Mapping[str, Progress] = NOTHING_KNOWN, now: float = 0.0) -> Revision:
        """Take over the new estimates of a placed job (`Placer.correct`). If it has become easier to place, jobs may start or
        move in consequence. Nothing, where it is not placed."""
        home = self.home(job.name)
        if home is None:
            return Revision()
        with self._taken(home) as placer:
            done = placer.correct(job, progress)
        return Revision((*done.moves, *self._follow(home, unmoved(progress, done.moves), now)), done.actions)

    def vacate(self, node: str, progress: Mapping[str, Progress] = NOTHING_KNOWN) -> list[Move]:
        """Move the jobs that can be moved off a closed node. Returns the jobs that move or start in consequence."""
        moves: list[Move] = []
        for pair in [pair for pair, nodes in self._pools.items() if node in nodes]:
            with self._taken(pair) as placer:
                moves += placer.vacate(node, progress)
        return moves + (self.start_waiting(unmoved(progress, moves)) if moves else [])

    def repack(self, progress: Mapping[str, Progress] = NOTHING_KNOWN, now: float = 0.0) -> list[Move]:
        """Move jobs where that pays by now."""
        moves: list[Move] = []
        for pair in self.clusters:
            with self._taken(pair) as placer:
                moves += placer.repack(progress, now)
        return moves + (self.start_waiting(unmoved(progress, moves)) if moves else [])

    def _follow(self, pair: str, progress: Mapping[str, Progress], now: float) -> list[Move]:
        """Jobs that start when something has changed in the pair, and then those whose move would save something there."""
        started = self.start_waiting(progress)
        with self._taken(pair) as placer:
            moved = placer.repack(progress, now)
        return started + moved + (self.start_waiting(unmoved(progress, moved)) if moved else [])

    # --- waiting jobs ---

    def start_waiting(self, progress: Mapping[str, Progress]) -> list[Move]:
        """Start the waiting jobs that have room now, one after the other."""
        moves: list[Move] = []
        while self.waiting and (started := self._start_one(progress)):
            moves.append(started)
        return moves

    def _start_one(self, progress: Mapping[str, Progress]) -> Move | None:
        blocked = self._overdue()
        for entry in self.waiting:
            offers: dict[str, tuple[JobSpec, Offer]] = {}
            for pair in [pair for pair in self.clusters if blocked.get(pair, entry.job.name) == entry.job.name]:
                spec = entry.job if pair == (entry.pair or self._first) else entry.elsewhere.get(pair)
                if spec is not None and (offer := self._up_to_date(pair).offer(spec, progress)):
                    offers[pair] = spec, offer
            if offers:
                return self._start(entry, offers)
        return None

    def _start(self, entry: Queued, offers: Mapping[str, tuple[JobSpec, Offer]]) -> Move:
        """In the pair in which its work costs the least; an older job that could have had a node there was passed."""
        pair = min(offers, key=lambda pair: offers[pair][1].usd * offers[pair][0].iteration_s)
        with self._taken(pair) as placer:
            move = placer.start(*offers[pair])
        at = self.waiting.index(entry)
        self.waiting = [*self._passed(self.waiting[:at], pair), *self.waiting[at + 1 :]]
        return move

    def _passed(self, entries: Sequence[Queued], pair: str) -> list[Queued]:
        """These waiting jobs when another job has started in the pair."""
        replace = msgspec.structs.replace
        return [replace(entry, passed=entry.passed + 1) if self._concerns(entry, pair) else entry for entry in entries]

    def _overdue(self) -> dict[str, str]:
        """By pair, the oldest job that no other may pass any more there."""
        late = [entry for entry in self.waiting if entry.passed >= self.rules.max_bypass]
        first = {pair: next((entry for entry in late if self._concerns(entry, pair)), None) for pair in self.clusters}
        return {pair: entry.job.name for pair, entry in first.items() if entry is not None}

    def _concerns(self, entry: Queued, pair: str) -> bool:
        """Whether it waits for nodes of a pool that the pair has."""
        return not self._beside[pair].isdisjoint([entry.pair or self._first, *entry.elsewhere])

    # --- one of the placers ---

    @contextlib.contextmanager
    def _taken(self, pair: str) -> Iterator[Placer]:
        """The placer of the pair as all of them stand; its changes are taken over."""
        placer = self._up_to_date(pair)
        placer.groups.named, placer.moved_at = self.named, self.moved_at
        yield placer
        self.named, self.moved_at = placer.groups.named, placer.moved_at
        if placer.groups.touched:
            self.touched |= placer.groups.touched
            placer.groups.touched.clear()
            if len(self.clusters) > 1:
                self._nodes[pair] = _held(placer.groups.values())

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
        placer = Placer(msgspec.structs.replace(self.clusters[pair], closed=self._closed_to(pair)), self.rules)
        placer.adopt(groups, self.named, self.moved_at)
        return placer


def by_price(specs: Mapping[str, JobSpec], ways: Mapping[str, Sequence[Alternative]]) -> dict[str, float]:
    """USD per hour of as much of the job's work as the first pair does alone in an hour, at the cheapest place of each pair,
    lowest first; infinite where there is none now."""
    first = next(iter(specs.values()))
    usd = {pair: explain.cheapest(places) * specs[pair].iteration_s / first.iteration_s for pair, places in ways.items()}
    return dict(sorted(usd.items(), key=lambda found: (found[1], specs[found[0]].iteration_s)))


def pair_of(rollout: Iterable[str], train: Iterable[str], clusters: Mapping[str, Cluster]) -> str:
    """The first pair whose pools have these nodes, or most of them: some may have left their pool while jobs are there."""
    rollout, train = set(rollout), set(train)
    return max(clusters, key=lambda pair: len(rollout & clusters[pair].rollout.names) + len(train & clusters[pair].train.names))


def _held(groups: Iterable[Group]) -> frozenset[str]:
    return frozenset(node for group in groups for node in (*group.rollout_nodes, *group.train_nodes))
