"""The entry of placement: takes a question (a job arrives, leaves, is other than estimated; nodes came free) and answers with
decisions and reasons.

Pure. Called by the coordinator's placement thread, `verl-mux plan`, and the simulation and the paper's re-run in research/.

There may be several pairs of a rollout and a training pool, each with a Placer of its own; a pool may be in more than one of
them. A job that arrives has estimates for each pair that could hold it, as phases last otherwise on other kinds of GPUs. It goes
to the pair where as much of its work costs the least, of all pairs or, if it has to wait, of those that have room then; and it
stays in that pair: moves are within one. Nodes that the groups of one pair hold are closed to the others.

In a finite cluster jobs wait in order of arrival. Younger jobs may pass a waiting one where it does not fit and they do; but
after `max_bypass` of them no other job starts before it in its pools: what comes free is kept for it. So every job that fits the
empty cluster starts, if running jobs end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement import explain
from verl_mux.placement.feasibility import TOLERANCE, Progress
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.groups import Books, Extension, Place, extensions, isolated_usd, pairs_of_pins
from verl_mux.placement.model import (
    OURS,
    OWN_NODES,
    STRATEGIES,
    Alternative,
    Cluster,
    Decision,
    Group,
    JobSpec,
    NodeKind,
    Rules,
    allowed,
    check_fits,
    modes_of,
    too_large,
)
from verl_mux.placement.placer import Action, Move, Placer, moved, unmoved

# --- questions ---


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


# --- answers ---


class Queued(msgspec.Struct, frozen=True):
    """A job that waits for room. passed: younger jobs that started before it. pair: of pools, in which it is as `job` says, ""
    for the first; elsewhere: as it is in others that could hold it."""

    job: JobSpec
    passed: int = 0
    pair: str = ""
    elsewhere: dict[str, JobSpec] = {}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """moves: jobs that start or move. actions: what was done for SLOs at risk. decision: about the job that arrived, with the
    alternatives; spec: that job as it was decided on; because: the reason, the end of a sentence.

    What becomes of the record: changed, gone: groups, the latter by name; waiting, named, moved_at: as in Record. pending: moves
    are in view that may pay later."""

    moves: tuple[Move, ...] = ()
    actions: tuple[Action, ...] = ()
    decision: Decision | None = None
    spec: JobSpec | None = None
    because: str = ""
    changed: tuple[Group, ...] = ()
    gone: tuple[str, ...] = ()
    waiting: tuple[Queued, ...] = ()
    named: int = 0
    moved_at: tuple[float, ...] = ()
    pending: bool = False


# --- the record ---


class Record(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for the index
    """The whole memory of a planner. groups: as they are. waiting: in order of arrival. named: groups that were ever named, for
    the next one's name. moved_at: seconds, of the moves of the last hour that count against the limit. version: number of
    changes, so that a kept planner can be compared with it."""

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

    def job(self, name: str) -> JobSpec | None:
        """The last estimates of a job that is placed or waits."""
        if (group := self._home.get(name)) is not None:
            return group.pin_of(name).job
        return next((entry.job for entry in self.waiting if entry.job.name == name), None)

    def group_of(self, name: str) -> Group | None:
        return self._home.get(name)

    def after(self, answer: Answer) -> Record:
        """The record that the answer makes of this one."""
        groups = {name: group for name, group in self.by_name.items() if name not in answer.gone}
        groups.update((group.name, group) for group in answer.changed)
        version = self.version + 1
        return Record(
            groups=tuple(groups.values()), waiting=answer.waiting, named=answer.named, moved_at=answer.moved_at, version=version
        )


# Groups that are looked at where there are too many.
NEAREST = 2
# After this time it is worth asking again about moves that do not pay yet.
ASK_AGAIN_S = 120.0


class Planner:
    """clusters: by name of the pair, the first one first. closed: nodes on which no further job is placed. waiting: as of a
    record."""

    def __init__(
        self, clusters: Mapping[str, Cluster], rules: Rules, record: Record | None = None, closed: frozenset[str] = frozenset()
    ) -> None:
        record = record or Record()
        self.clusters, self.rules, self.closed = dict(clusters), rules, closed
        self.waiting = list(record.waiting)
        self.books = Books(named=record.named, moved_at=list(record.moved_at))
        self._first = next(iter(self.clusters))
        sides = {pair: {cluster.rollout.name, cluster.train.name} for pair, cluster in self.clusters.items()}
        # The pairs that have a pool in common with a pair, itself among them.
        self._beside = {pair: {other for other in sides if sides[pair] & sides[other]} for pair in sides}
        groups: dict[str, list[Group]] = {pair: [] for pair in self.clusters}
        for group in record.groups:
            groups[pair_of(group.rollout_nodes, group.train_nodes, self.clusters)].append(group)
        held = {pair: _held(there) for pair, there in groups.items()}
        self._placers = {pair: self._made(pair, there, self._closed_to(pair, held)) for pair, there in groups.items()}

    @classmethod
    def of_one(cls, cluster: Cluster, rules: Rules = OURS) -> Planner:
        """An empty planner of one pair of pools."""
        return cls({"": cluster}, rules, closed=cluster.closed)

    @property
    def groups(self) -> Mapping[str, Group]:
        """Of all pairs, by name."""
        if len(self._placers) == 1:
            return self._placers[self._first].groups
        return {name: group for placer in self._placers.values() for name, group in placer.groups.items()}

    @property
    def placer(self) -> Placer:
        """Of the first pair."""
        return self.placer_of(self._first)

    def placer_of(self, pair: str) -> Placer:
        """With what the other pairs hold by now closed to it."""
        placer = self._placers[pair]
        if len(self._placers) > 1:
            held = {other: _held(there.groups.values()) for other, there in self._placers.items()}
            if placer.cluster.closed != (closed := self._closed_to(pair, held)):
                placer = self._placers[pair] = self._made(pair, list(placer.groups.values()), closed)
        return placer

    def _closed_to(self, pair: str, held: Mapping[str, frozenset[str]]) -> frozenset[str]:
        mine = self.clusters[pair].rollout.names | self.clusters[pair].train.names
        return self.closed.union(*(nodes & mine for other, nodes in held.items() if other != pair))

    def _made(self, pair: str, groups: Sequence[Group], closed: frozenset[str]) -> Placer:
        placer = Placer(msgspec.structs.replace(self.clusters[pair], closed=closed), self.rules, self.books)
        placer.adopt(groups)
        return placer

    def home(self, job: str) -> str | None:
        """The pair in which the job is placed."""
        return next((pair for pair, placer in self._placers.items() if job in placer.groups.home), None)

    def waits(self, job: str) -> bool:
        return any(entry.job.name == job for entry in self.waiting)

    # --- questions ---

    def answer(
        self,
        question: Question,
        progress: Mapping[str, Progress],
        now: float = 0.0,
        held: frozenset[str] = frozenset(),
        explained: int | None = 0,
    ) -> Answer:
        """progress: how far the placed jobs are, by name, without those that have not begun. now: seconds of any clock. held:
        jobs that may not be moved now. explained: reasons are given for a job that arrives, and of more groups than this only the
        nearest are looked at as alternatives; None: all are; 0: no reasons."""
        self.books.held = held
        self.books.touched.clear()
        match question:
            case Arrive():
                found = self._arrive({question.pair or self._first: question.job, **question.elsewhere}, progress, explained)
            case Correct():
                found = self._revise(question.job, progress, now)
            case Leave():
                found = Answer(moves=tuple(self._depart(question.name, progress, now)))
            case Vacate():
                found = Answer(moves=tuple(self._vacate(question.node, progress)))
            case Again():
                found = Answer(moves=tuple(self._repack(progress, now)))
            case _:  # nodes are open again
                found = Answer(moves=tuple(self._start_waiting(progress)))
        groups, touched = self.groups, sorted(self.books.touched)
        return msgspec.structs.replace(
            found,
            changed=tuple(groups[name] for name in touched if name in groups),
            gone=tuple(name for name in touched if name not in groups),
            waiting=tuple(self.waiting),
            named=self.books.named,
            moved_at=tuple(self.books.moved_at),
            pending=any(placer.pending for placer in self._placers.values()),
        )

    def _arrive(self, specs: Mapping[str, JobSpec], progress: Mapping[str, Progress], explained: int | None) -> Answer:
        if explained == 0:
            pair, decision = self._admit(specs, specs, progress)
            return Answer(decision=decision, spec=specs[pair])
        could = {pair: alternatives(self.placer_of(pair), spec, explained) for pair, spec in specs.items()}
        usd = by_price(specs, could)
        pair, decision = self._admit(specs, usd, progress)
        lost = explain.lost_to(decision, could[pair]) + explain.lost_elsewhere(pair, could, usd)
        because = explain.because(decision, specs[pair], could[pair])
        decision = msgspec.structs.replace(decision, alternatives=tuple(lost))
        return Answer(decision=decision, spec=specs[pair], because=because + explain.in_other_pairs(pair, usd))

    def _admit(
        self, specs: Mapping[str, JobSpec], order: Iterable[str], progress: Mapping[str, Progress]
    ) -> tuple[str, Decision]:
        """Into the first of these pairs that takes the job now; else it waits, in all. Raises UserError for a name in use and
        for a job that the empty cluster cannot hold."""
        (first, job), *others = specs.items()
        blocked, refused = self._overdue(), []
        for pair in order:
            check_fits(specs[pair], self.clusters[pair], self.rules)
            if self.home(job.name) is not None or self.waits(job.name):
                raise UserError(f"job {job.name!r} is placed or waiting already; job names are unique")
            wait = f"job {blocked[pair]!r} waits longer and is next" if pair in blocked else "no room within everybody's SLO"
            placer = self.placer_of(pair)
            before = placer.groups.usd_per_hour
            if pair not in blocked and (place := placer.search.offer(specs[pair], progress)):
                group = placer.groups.take(place)
                self.waiting = self._passed(self.waiting, pair)
                return pair, decision_for(group, placer.groups.usd_per_hour - before)
            refused.append((pair, Decision(job=job.name, outcome="queued", wait=wait)))
        self.waiting.append(Queued(job, pair="" if first == self._first else first, elsewhere=dict(others)))
        return refused[0]

    def _depart(self, name: str, progress: Mapping[str, Progress], now: float) -> list[Move]:
        """Drop the job and the nodes on which it was alone. Returns the jobs that start or move in consequence; nothing, where it
        is not there."""
        blocked = self._overdue()
        self.waiting = [entry for entry in self.waiting if entry.job.name != name]
        home = self.home(name)
        if home is None:
            return self._start_waiting(progress) if name in blocked.values() else []
        moves = self.placer_of(home).drop(name, progress)
        return moves + self._follow(home, unmoved(progress, moves), now)

    def _revise(self, job: JobSpec, progress: Mapping[str, Progress], now: float) -> Answer:
        """Take over the new estimates of a placed job (`Placer.correct`). If it has become easier to place, jobs may start or
        move in consequence. Nothing, where it is not placed."""
        home = self.home(job.name)
        if home is None:
            return Answer()
        moves, actions = self.placer_of(home).correct(job, progress)
        moves += self._follow(home, unmoved(progress, moves), now)
        return Answer(moves=tuple(moves), actions=tuple(actions))

    def _vacate(self, node: str, progress: Mapping[str, Progress]) -> list[Move]:
        """Move the jobs that can be moved off a closed node. Returns the jobs that move or start in consequence."""
        pairs = [pair for pair, cluster in self.clusters.items() if node in cluster.rollout.names | cluster.train.names]
        return self._then_start([move for pair in pairs for move in self.placer_of(pair).vacate(node, progress)], progress)

    def _repack(self, progress: Mapping[str, Progress], now: float) -> list[Move]:
        """Move jobs where that pays by now."""
        return self._then_start([move for pair in self.clusters for move in self.placer_of(pair).repack(progress, now)], progress)

    def _follow(self, pair: str, progress: Mapping[str, Progress], now: float) -> list[Move]:
        """Jobs that start when something has changed in the pair, and then those whose move would save something there."""
        return self._start_waiting(progress) + self._then_start(self.placer_of(pair).repack(progress, now), progress)

    def _then_start(self, moves: list[Move], progress: Mapping[str, Progress]) -> list[Move]:
        return moves + (self._start_waiting(unmoved(progress, moves)) if moves else [])

    # --- waiting jobs ---

    def _start_waiting(self, progress: Mapping[str, Progress]) -> list[Move]:
        """Start the waiting jobs that have room now, one after the other."""
        moves: list[Move] = []
        while self.waiting and (started := self._start_one(progress)):
            moves.append(started)
        return moves

    def _start_one(self, progress: Mapping[str, Progress]) -> Move | None:
        blocked = self._overdue()
        for entry in self.waiting:
            places: dict[str, Place] = {}
            for pair in [pair for pair in self.clusters if blocked.get(pair, entry.job.name) == entry.job.name]:
                spec = entry.job if pair == (entry.pair or self._first) else entry.elsewhere.get(pair)
                if spec is not None and (place := self.placer_of(pair).search.offer(spec, progress)):
                    places[pair] = place
            if places:
                return self._start(entry, places)
        return None

    def _start(self, entry: Queued, places: Mapping[str, Place]) -> Move:
        """In the pair in which its work costs the least; an older job that could have had a node there was passed."""
        pair = min(places, key=lambda pair: places[pair].usd * places[pair].job.iteration_s)
        move = moved(places[pair].job, "start", self.placer_of(pair).groups.take(places[pair]))
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


def pair_of(rollout: Iterable[str], train: Iterable[str], clusters: Mapping[str, Cluster]) -> str:
    """The first pair whose pools have these nodes, or most of them: some may have left their pool while jobs are there."""
    rollout, train = set(rollout), set(train)
    return max(clusters, key=lambda pair: len(rollout & clusters[pair].rollout.names) + len(train & clusters[pair].train.names))


def _held(groups: Iterable[Group]) -> frozenset[str]:
    return frozenset(node for group in groups for node in (*group.rollout_nodes, *group.train_nodes))


def decision_for(group: Group, usd_per_hour: float) -> Decision:
    """The decision that put the last job of `group` there, at `usd_per_hour` more for all groups."""
    *others, pin = group.pins
    new_rollout = not set(pin.rollout) <= {node for other in others for node in other.rollout}
    new_train = not set(pin.train) <= {node for other in others for node in other.train}
    return Decision(
        job=pin.job.name,
        outcome="placed",
        strategy=STRATEGIES[new_rollout, new_train] if others else OWN_NODES[pin.job.colocated],
        group=group.name,
        rollout=pin.runs_rollouts_on,
        train=pin.train,
        order=group.order,
        usd_per_hour=usd_per_hour,
    )


# --- the places that a job could take; asked before it is admitted ---


def alternatives(placer: Placer, job: JobSpec, most: int | None = None) -> list[Alternative]:
    """What every group would ask for the job, or why it cannot take it; last, what nodes of its own would cost, in each mode.
    most: of more groups than this, only the NEAREST, which could ask the least."""
    groups = list(placer.groups.values())
    if most is not None and len(groups) > most:
        near = placer.search.shortlist(modes_of(job, placer.cluster, placer.rules), math.inf)
        groups = list({group.name: group for _, _, group in near}.values())[:NEAREST]
    modes = allowed(job, placer.rules)
    return [*(_at(placer, modes, group) for group in groups), *(_alone(placer, placed) for placed in modes)]


def _alone(placer: Placer, job: JobSpec) -> Alternative:
    why = too_large(job, placer.cluster) or _short(placer, job.nodes, "nodes")
    return Alternative(group=None, strategy=OWN_NODES[job.colocated], usd_per_hour=isolated_usd(job, placer.cluster), why=why)


def _at(placer: Placer, modes: Sequence[JobSpec], group: Group) -> Alternative:
    """The cheapest way into the group, or what stands against the one that comes closest."""
    if len(group.pins) >= placer.rules.cap:
        return _refused(group, f"full: {len(group.pins)} jobs, the cap")
    ways = [_in_mode(placer, placed, group) for placed in modes]
    return min((way for way in ways if not way.why), key=lambda way: way.price, default=ways[0])


def _in_mode(placer: Placer, job: JobSpec, group: Group) -> Alternative:
    rules = placer.rules
    found = extensions(group, job, placer.cluster, rules)
    if not found:
        return _refused(group, _no_room(placer, job, group))
    rollout, train = pairs_of_pins(group.pins)
    ways = []
    for ask in found:
        if placer.feasibility.allows((*group.jobs, job), rollout | ask.rollout.pairs, train | ask.train.pairs):
            why = _short(placer, (ask.rollout.new, ask.train.new), "new nodes")
            work_usd = placer.search.priced(job, group, ask).usd if rules.count_stays else None
            way = Alternative(group=group.name, strategy=ask.strategy, usd_per_hour=ask.usd, why=why, work_usd_per_hour=work_usd)
            ways.append(way)
            if not why and not rules.count_stays:
                break  # none that follows costs less
    if ways:
        return min(ways, key=lambda way: (bool(way.why), way.price))
    return _refused(group, _too_slow(job, group, found[0]), found[0])


def _refused(group: Group, why: str, ask: Extension | None = None) -> Alternative:
    strategy, usd = (ask.strategy, ask.usd) if ask else ("direct packing", None)
    return Alternative(group=group.name, strategy=strategy, usd_per_hour=usd, why=why)


def _short(placer: Placer, need: tuple[int, int], what: str) -> str:
    free = placer.groups.free
    if need[0] <= free[0] and need[1] <= free[1]:
        return ""
    return f"needs {need[0]} + {need[1]} {what}; free are {free[0]:g} + {free[1]:g}"


def _no_room(placer: Placer, job: JobSpec, group: Group) -> str:
    on = [group.on_rollout(node) for node in group.rollout_nodes], [group.on_train(node) for node in group.train_nodes]
    return "; ".join(_side_full(at, job, on[at], placer.cluster.kinds[at]) for at in (0, 1) if job.nodes[at] and on[at])


def _side_full(at: int, job: JobSpec, nodes: Sequence[Sequence[JobSpec]], kind: NodeKind) -> str:
    side = ("rollout", "train")[at]
    memory_gb, share = job.memory_gb[at], getattr(job, f"{side}_share")
    roomy = [on for on in nodes if sum(j.memory_gb[at] for j in on) + memory_gb <= kind.host_memory_gb]
    if not roomy:
        return f"no {side} node has {memory_gb:.0f} GB of host memory left"
    least = min(sum(getattr(j, f"{side}_share") for j in on) for on in roomy)
    if least + share > TOLERANCE:
        return f"every {side} node is busy for at least {least:.0%} of the time and the job needs {share:.0%}"
    return f"no allowed way to share its {side} nodes"


def _too_slow(job: JobSpec, group: Group, ask: Extension) -> str:
    """The job that would miss its SLO in the cheapest layout; or that a departure could make a job miss it."""
    whole = Place(job, ask.usd, group, ask).group
    for member, period in zip(whole.jobs, group_periods(whole).values(), strict=True):
        if period > member.limit_s * TOLERANCE:
            return f"{member.name} would take {period:.0f} s an iteration, its SLO allows {member.limit_s:.0f} s"
    return "within every SLO now, but not if one of its jobs left"


def by_price(specs: Mapping[str, JobSpec], ways: Mapping[str, Sequence[Alternative]]) -> dict[str, float]:
    """USD per hour of as much of the job's work as the first pair does alone in an hour, at the cheapest place of each pair,
    lowest first; infinite where there is none now."""
    first = next(iter(specs.values()))
    least = {pair: min((way.price for way in places if not way.why), default=math.inf) for pair, places in ways.items()}
    usd = {pair: cost * specs[pair].iteration_s / first.iteration_s for pair, cost in least.items()}
    return dict(sorted(usd.items(), key=lambda found: (found[1], specs[found[0]].iteration_s)))
