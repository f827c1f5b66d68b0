"""Jobs that leave their nodes to the coordinator are placed when they come, the rest planned anew when they go.

    asked for `auto` -> estimated from its needs -> placed | waits -> placed when a job leaves -> gone
                                                        observed step by step: estimates corrected, errors recorded
                                                        moved, if its launcher starts it again (placed_jobs.py)

A question is put on record; the Answerer answers it in the placement thread, beside the leases: however long it takes, phases are
granted meanwhile. The answer is an input like any other, so a restart finds every placement as it was, and the questions that
were open. Closed to the planner are nodes that jobs name themselves, as long as those jobs live, and those that are draining or
fenced. Runs in the coordinator: state.py calls `Placement` at the moments of `Feature`, server.py hands questions to the
Answerer; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import hosts, placed_jobs, registration
from verl_mux.coordinator.core import records as r
from verl_mux.coordinator.core.leases import Feature, Handler
from verl_mux.coordinator.core.records import RUNNING, Instruction, Job, JobState, Lease, Log, Request, Send, State, What
from verl_mux.coordinator.core.settings import Config
from verl_mux.errors import UserError
from verl_mux.placement.estimator import LEAST, WINDOW, corrected, in_pairs
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.model import LIVE, ORDERS, Cluster, Group, JobSpec, Pin, Pool
from verl_mux.placement.planner import (
    ASK_AGAIN_S,
    Again,
    Answer,
    Arrive,
    Correct,
    Leave,
    Open,
    Planner,
    Question,
    Record,
    Vacate,
    pair_of,
)
from verl_mux.profiling.eventlog import events

# Seconds of a phase; no longer one is believed.
MOST_S = 1e6
# Of a job that was sent somewhere by an answer about others.
_BECAUSE = {
    "start": "which came free while it waited",
    "move": "where it was moved, as that keeps an SLO, saves more than the move costs, or its node was taken away",
}
# Places of which the log says why they lost; all of them would take longer than the decision.
EXPLAINED = 8

# --- a job that asks for nodes ---


def specs(asked: m.Register, config: Config) -> dict[str, JobSpec]:
    """The job in each pair of pools that could hold it. Raises UserError: no pair could."""
    assert asked.needs is not None
    reasons = {pair: _too_few_gpus(asked, cluster, config) for pair, cluster in config.clusters.items()}
    clusters = {pair: config.clusters[pair] for pair, reason in reasons.items() if not reason}
    if not clusters:
        raise UserError(next(iter(reasons.values())))
    placing = config.placing
    return in_pairs(
        asked.job,
        asked.needs,
        clusters,
        profiled=asked.profiled,
        slo=placing.slo if asked.slo is None else asked.slo,
        movable=asked.movable,
        move_s=placing.move_s,
        colocated=asked.colocated,
    )


def _too_few_gpus(asked: m.Register, cluster: Cluster, config: Config) -> str:
    for side, pool in zip(m.SIDES, _pools(asked, cluster), strict=True):
        gpus, least = getattr(asked.needs, f"{side}_gpus"), min(node.gpus for node in config.pools[pool.name].nodes)
        if gpus > least:
            return f"job {asked.job!r} asks for {gpus} GPUs on each {side} node; those of pool {pool.name!r} have {least}"
    return ""


def _pools(asked: m.Register, cluster: Cluster) -> tuple[Pool, Pool]:
    """On which it rolls out and trains."""
    return cluster.train if asked.colocated else cluster.rollout, cluster.train


def _claimed_pair(asked: m.Register, config: Config) -> str:
    """The pair of pools in which a job says that it was placed, if in any."""
    rollout = [] if asked.colocated else asked.placed.get("rollout", [])
    return pair_of(rollout, asked.placed.get("train", []), config.clusters)


def _check(asked: m.Register, config: Config) -> None:
    """Whether the job can ever be placed. Raises UserError."""
    job, needs = f"job {asked.job!r}", asked.needs
    if config.placement is None:
        raise UserError(
            f"{job} leaves its nodes to the coordinator, which has no `placement: scheduler`; name nodes:"
            f" {config.describe_pools()}"
        )
    if needs is None:
        raise UserError(f"{job} leaves its nodes to the coordinator but does not say what it needs")
    if asked.slo is not None and not asked.slo >= 1:
        raise UserError(f"{job}: slo is {asked.slo:g}; an SLO is a factor of at least 1")
    for side in m.SIDES:
        seconds = getattr(asked.profiled, side)
        if len(seconds) > WINDOW or not all(0 < each < MOST_S for each in seconds):
            raise UserError(
                f"{job}: profiled {side} phases {list(seconds)[:5]}; at most {WINDOW} of more than 0 and less than {MOST_S:g} s"
                " are allowed"
            )
    if asked.colocated and needs.rollout_nodes != needs.train_nodes:
        raise UserError(
            f"{job} runs both phases on the same nodes, but asks for {needs.rollout_nodes} for rollout and {needs.train_nodes}"
            " for train"
        )
    if asked.placed:
        _check_claimed(asked, (needs.rollout_nodes, needs.train_nodes), config.clusters[_claimed_pair(asked, config)])
    specs(asked, config)


def _check_claimed(asked: m.Register, counts: tuple[int, int], cluster: Cluster) -> None:
    """Whether a job can have been placed where it says it was. Raises UserError."""
    for side, count, pool in zip(m.SIDES, counts, _pools(asked, cluster), strict=True):
        names = asked.placed.get(side, [])
        if len(set(names)) != count or len(names) != count or not set(names) <= pool.names:
            raise UserError(
                f"job {asked.job!r} says it was placed on {names[: count + 1]} for {side}; allowed: {count} of"
                f" {', '.join(pool.nodes or ())}"
            )


# --- questions and answers ---


class Asked(msgspec.Struct, frozen=True):
    """One question, and all that the answer depends on. closed: nodes that the placer may not give. held: jobs that it may not
    move, as they are on their way. now: in seconds."""

    question: Question
    record: Record
    config: Config
    closed: frozenset[str]
    now: float
    held: frozenset[str] = frozenset()


def asked(state: State, config: Config, now: float) -> Asked | None:
    """The next question for the placer, if there is one."""
    if not state.questions or config.placement is None:
        return None
    named = (job for job in state.jobs.values() if job.watched is None and not job.filler and job.state is not JobState.ENDED)
    by_hand = (node for job in named for node in job.all_nodes)
    closed = config.draining | state.fenced.keys() | frozenset(by_hand)
    return Asked(state.questions[0], state.placed, config, closed, now, held=frozenset(state.moves))


class Answerer:
    """Answers one question at a time, in the order in which they were asked. The planner is kept between answers, and made anew
    only where the record is not the one that its last answer made. So an answer may depend on what the planner remembers; that is
    why an answer is an input, and as such in the journal."""

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._made_for: tuple[Config, frozenset[str], int] | None = None

    def answer(self, asked: Asked, progress: Mapping[str, Progress]) -> r.Planned:
        config, closed, version = self._made_for or (None, None, None)
        if self._planner is None or config is not asked.config or (closed, version) != (asked.closed, asked.record.version):
            self._planner = Planner(asked.config.clusters, LIVE, asked.record, asked.closed)
        self._made_for = None  # until the answer is whole
        found = self._planner.answer(asked.question, progress, asked.now, asked.held, EXPLAINED)
        self._made_for = (asked.config, asked.closed, asked.record.version + 1)
        return r.Planned(version=asked.record.version, answer=found)


def nothing_follows(asked: Asked) -> r.Planned:
    """The answer to a question that could not be answered."""
    return r.Planned(version=asked.record.version, answer=_unchanged(asked.record))


def _unchanged(record: Record, **changes: object) -> Answer:
    same = Answer(waiting=record.waiting, named=record.named, moved_at=record.moved_at)
    return msgspec.structs.replace(same, **changes)


def _lines(answer: Answer) -> list[Instruction]:
    """What the event log says about an answer: of the job that came what was estimated, and why each alternative lost."""
    decision, spec = answer.decision, answer.spec
    if decision is not None and spec is not None:
        about = {name: getattr(decision, name) for name in ("job", "outcome", "strategy", "group", "usd_per_hour", "wait")}
        estimated = {"rollout_s": spec.rollout.seconds, "train_s": spec.train.seconds, "source": spec.rollout.source}
        memory = {"rollout_memory_gb": spec.rollout_memory_gb, "train_memory_gb": spec.train_memory_gb}
        lost = [{"group": place.group, "strategy": place.strategy, "why": place.why} for place in decision.alternatives]
        nodes = {"rollout": list(decision.rollout), "train": list(decision.train)}
        return [Log(events.PLACED, {**about, "nodes": nodes, "estimated": {**estimated, **memory}, "alternatives": lost})]
    out: list[Instruction] = [Log(events.SLO_AT_RISK, msgspec.structs.asdict(done)) for done in answer.actions]
    for move in [move for move in answer.moves if move.kind == "start"]:
        nodes = {"rollout": list(move.rollout), "train": list(move.train)}
        out.append(Log(events.PLACED, {"job": move.job, "outcome": "placed", "group": move.group, "nodes": nodes}))
    return out


# --- what placed jobs hold ---


def _nodes(groups: Iterable[Group]) -> set[str]:
    return {node for group in groups for node in (*group.rollout_nodes, *group.train_nodes)}


def is_open(state: State, name: str) -> bool:
    """Whether the placer has yet to say where the job goes."""
    return any(isinstance(question, Arrive) and question.job.name == name for question in state.questions)


def _waits_for(state: State, job: Job) -> list[str]:
    """Jobs that have yet to leave the nodes on which this one was placed."""
    if (group := state.placed.group_of(job.name)) is None:
        return []
    pin = group.pin_of(job.name)
    staying = [(other, moving.before) for other, moving in state.moves.items() if other != job.name and moving.left_at is None]
    return [other for other, before in staying if any({*pin.rollout, *pin.train} & set(side) for side in before.values())]


def _pin(state: State, job: Job) -> None:
    """The job is where it was placed; while others have yet to leave those nodes, it has none."""
    group = state.placed.group_of(job.name)
    if group is not None and not _waits_for(state, job):
        pin = group.pin_of(job.name)
        job.nodes = {"rollout": list(pin.runs_rollouts_on), "train": list(pin.train)}
        job.host_memory = hosts.estimated(pin)


def _where(group: Group) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """The nodes of each of its jobs, by name."""
    return {pin.job.name: (frozenset(pin.rollout), frozenset(pin.train)) for pin in group.pins}


class Placement(Feature):
    _resumed_at = 0.0

    def handlers(self) -> Mapping[type, Handler]:
        return {
            r.Planned: lambda now, job, what: self._carry_out(what, now),
            r.MoveGivenUp: lambda now, job, what: self._give_up(what.job, "it did not come back in time"),
            r.MovesDue: self._ask_again,
            **dict.fromkeys((r.HostMeasured, m.HostReport), self._measured),
        }

    # --- registration ---

    def refusal(self, asked: m.Register, nodes: dict[str, list[str]], is_known: bool) -> str | None:
        if asked.wants_placement:
            _check(asked, self.core.config)
            return None
        for group in self.core.state.placed.groups if not asked.filler else ():
            for node in (*group.rollout_nodes, *group.train_nodes):
                if any(node in names for names in nodes.values()):
                    return (
                        f"job {asked.job!r} names node {node!r}, on which the coordinator has placed"
                        f" {', '.join(job.name for job in group.jobs)}; leave the nodes to it (`auto`), or name others"
                    )
        return None

    def registered(self, now: float, job: Job, asked: m.Register) -> list[Instruction]:
        """The placer is asked where the job goes, and `job.nodes` stays empty until it says so."""
        state, config = self.core.state, self.core.config
        if not asked.wants_placement:
            return []
        if placed_jobs.returns(state, job, asked):
            _pin(state, job)
            return []
        job.watched = r.Watched()
        found = specs(asked, config)
        first, spec = next(iter(found.items()))
        if asked.placed:
            return self._readopt(job, found.get(_claimed_pair(asked, config), spec), asked.placed)
        out = self._give_up(job.name, "another job came under its name")
        del found[first]
        state.questions.append(Arrive(spec, pair=first, elsewhere=found))
        return out

    def _readopt(self, job: Job, spec: JobSpec, placed: dict[str, list[str]]) -> list[Instruction]:
        """After a loss of memory: the job is where it says, with all jobs that share a node with it."""
        state, before = self.core.state, self.core.state.placed
        pin = Pin(job=spec, rollout=() if spec.colocated else tuple(placed["rollout"]), train=tuple(placed["train"]))
        near = [group for group in before.groups if not {*pin.rollout, *pin.train}.isdisjoint(_nodes([group]))]
        named = before.named + (not near)
        pins = (*(each for group in near for each in group.pins), pin)
        merged = Group(
            name=near[0].name if near else f"g{named}",
            pins=pins,
            rollout_nodes=tuple(dict.fromkeys(node for each in pins for node in each.rollout)),
            train_nodes=tuple(dict.fromkeys(node for each in pins for node in each.train)),
        )
        gone = tuple(group.name for group in near)
        state.placed = before.after(_unchanged(before, gone=gone, changed=(merged,), named=named))
        _pin(state, job)
        return self._regrouped(before, [merged])

    def why_queued(self, job: Job) -> str | None:
        if job.nodes:
            return None
        queue = [entry.job.name for entry in self.core.state.placed.waiting]
        if before := _waits_for(self.core.state, job):
            return f"job {job.name!r} waits until {', '.join(before)} has left for other nodes"
        if job.name in queue:
            return f"job {job.name!r} waits for nodes: no room within everybody's SLO, {queue.index(job.name)} jobs before it"
        return f"job {job.name!r} waits to be placed"

    def answers_later(self, job: Job) -> bool:
        return is_open(self.core.state, job.name)

    # --- the answer ---

    def _carry_out(self, what: r.Planned, now: float) -> list[Instruction]:
        """Takes over what the placer answered, and sends their nodes to the jobs that learn them now."""
        state, before, answer = self.core.state, self.core.state.placed, what.answer
        if what.version != before.version or not state.questions or self._takes_what_left(answer):
            return []  # it was asked about other records, and will be asked again
        question = state.questions.pop(0)
        state.placed = before.after(answer)
        state.ask_again_at = now + ASK_AGAIN_S if answer.pending else None
        for move in answer.moves:
            state.watched_of(move.job).because = _BECAUSE[move.kind]
        names = [move.job for move in answer.moves if move.kind == "start"]
        if isinstance(question, Arrive):
            state.watched_of(question.job.name).because = answer.because
            names.append(question.job.name)
        out = _lines(answer)
        for move in [move for move in answer.moves if move.kind == "move"]:
            out += placed_jobs.move_decided(state, move, now)
        # One that left and came again waits for its own answer.
        placed = [state.jobs[name] for name in names if name in state.jobs and not is_open(state, name)]
        for job in placed:
            _pin(state, job)
        for group in answer.changed:
            for spec, rank in zip(group.jobs, ORDERS[group.order](group.jobs), strict=True):
                state.watched_of(spec.name).rank = rank
        return self._send_nodes(placed, [*out, *self._regrouped(before, answer.changed)])

    def _takes_what_left(self, answer: Answer) -> bool:
        """Whether it places a job on a node that has left, or began to drain, since the question."""
        config, nodes = self.core.config, _nodes(answer.changed)
        had = _nodes(self.core.state.placed.groups)
        return not nodes <= config.nodes.keys() or not (nodes - had).isdisjoint(config.draining)

    def _regrouped(self, before: Record, groups: Iterable[Group]) -> list[Instruction]:
        """What is predicted for every group whose jobs or their nodes have changed; their observations begin anew."""
        state = self.core.state
        out: list[Instruction] = []
        for group in groups:
            old = before.by_name.get(group.name)
            if old is None or _where(old) != _where(group):
                for job in group.jobs:
                    state.watched_of(job.name).fresh = 0
                out.append(placed_jobs.predicted(group, state, self.core.config))
        return out

    def _send_nodes(self, started: list[Job], out: list[Instruction]) -> list[Instruction]:
        """After `out`, their nodes to jobs that asked for nodes, or that they wait."""
        return [*out, *(Send(c, registration.welcome(self.core, job, c)) for job in started for c in job.clients)]

    # --- a job leaves ---

    def leaves(self, now: float, job: Job, what: m.Deregister) -> None:
        placed_jobs.leaves(self.core.state, job, what, now)

    def ended(self, now: float, job: Job) -> list[Instruction]:
        """Its nodes are given on when the placer has said to whom; one that comes back keeps its place. Jobs that waited until it
        had left its nodes learn theirs."""
        state, out = self.core.state, []
        if not placed_jobs.comes_back(state, job):
            out = placed_jobs.given_up(state, job.name, "it ended instead")
            if job.watched is not None:
                state.questions.append(Leave(job.name))
            elif not job.filler:
                self.nodes_opened()
        waiting = [each for each in state.jobs.values() if each.watched is not None and not each.nodes and each.state in RUNNING]
        waiting = [each for each in waiting if not is_open(state, each.name)]
        for each in waiting:
            _pin(state, each)
        return self._send_nodes([each for each in waiting if each.nodes], out)

    def _give_up(self, name: str, reason: str) -> list[Instruction]:
        """The place of a job that is away is kept no longer."""
        out = placed_jobs.given_up(self.core.state, name, reason)
        if out:
            self.core.state.questions.append(Leave(name))
        return out

    # --- what changes while jobs run ---

    def requested(self, now: float, job: Job, request: Request) -> list[Instruction]:
        moved = placed_jobs.begins(self.core.state, self.core.config, job, request, now)
        placed_jobs.asked(job, request)
        if moved:
            self._correct(job)
        return moved

    def granted(self, now: float, lease: Lease) -> None:
        watched = self.core.state.jobs[lease.job].watched
        if watched is not None and lease.phase in m.SIDES:
            watched.doing = lease.phase, now, True

    def released(self, now: float, job: Job, lease: Lease) -> list[Instruction]:
        """What the phase took, and what that changes."""
        state, spec = self.core.state, self.core.state.placed.job(job.name)
        if job.watched is None or spec is None:
            return []
        placed_jobs.counted(job.watched, lease, now)
        if job.name in state.moves:  # a phase that ends with a checkpoint for it says nothing of others
            job.watched.free_since = now
            return []
        out = placed_jobs.released(job.watched, lease, spec, now)
        # From now on it was seen long enough for others of its group to be moved.
        self._correct(job, anyway=lease.phase == "train" and job.watched.observed.steps == LEAST)
        group = state.placed.group_of(job.name)
        if group is not None and lease.phase == "train" and placed_jobs.is_due(group, job, state, self.core.config):
            out.append(placed_jobs.predicted(group, state, self.core.config))
        return out

    def resumed(self, now: float) -> None:
        self._resumed_at = now

    def due(self, now: float) -> list[What]:
        return placed_jobs.due(self.core.state, now, self._resumed_at)

    def move_of(self, job: Job) -> int:
        return placed_jobs.move_of(self.core.state, job)

    def nodes_opened(self) -> None:
        """Jobs that wait, or are about to, may go to nodes that were closed to the placer."""
        state = self.core.state
        if (state.placed.waiting or state.questions) and Open() not in state.questions[1:]:
            state.questions.append(Open())

    def node_drained(self, node: str) -> None:
        """The jobs placed on the node that can be moved go elsewhere."""
        if node in _nodes(self.core.state.placed.groups):
            self.core.state.questions.append(Vacate(node))

    def _ask_again(self, now: float, job: None, what: r.MovesDue) -> list[Instruction]:
        """Moves that did not pay may pay by now."""
        state = self.core.state
        state.ask_again_at = None
        if Again() not in state.questions[1:]:
            state.questions.append(Again())
        return []

    def _measured(self, now: float, job: Job, what: r.HostMeasured | m.HostReport) -> list[Instruction]:
        self._correct(job)
        return []

    def _correct(self, job: Job, anyway: bool = False) -> None:
        """The placer learns of a job that turns out other than it was placed by; `anyway`: also of one that does not. The last of
        several corrections that wait is enough."""
        state, spec = self.core.state, self.core.state.placed.job(job.name)
        if job.watched is None or spec is None:
            return
        revised = hosts.revised(job, corrected(spec, job.watched.observed) or spec)
        if job.watched.move_s not in (None, revised.move_s):  # the next move is expected to take as long as the last one
            revised = msgspec.structs.replace(revised, move_s=job.watched.move_s)
        if revised is not spec or anyway:
            state.questions = [q for q in state.questions if not (isinstance(q, Correct) and q.job.name == spec.name)]
            state.questions.append(Correct(revised))
