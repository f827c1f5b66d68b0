"""Answers what placement is asked, outside the path of leases: whatever this takes, phases are granted meanwhile. Pure.

A placer is kept between answers, and made anew only where the record is not the one that its last answer made. So what it answers
may depend on what it remembers; that is why an answer is an input of the state machine, and as such in the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from verl_mux.coordinator.core.inputs_and_instructions import Planned, Said
from verl_mux.coordinator.core.settings import Config, Pool
from verl_mux.profiling.eventlog import events
from verl_mux.scheduling.model import JobSpec
from verl_mux.scheduling.placer import sentences, shortage
from verl_mux.scheduling.placer.explain import alternatives, lost_to
from verl_mux.scheduling.placer.placer import Placer
from verl_mux.scheduling.placer.record import Again, Arrive, Correct, Leave, Open, Question, Queued, Record, Vacate, restore
from verl_mux.scheduling.search.decision import Action, Alternative, Decision, Move
from verl_mux.scheduling.time.forecast import Progress

# Places of which the log says why they lost; all of them would take longer than the decision.
TOLD = 8
# Nodes of a pool that are thought of as lacking, at most.
WANTED_AT_ONCE = 32


class Asked(msgspec.Struct, frozen=True):
    """One question, and all that the answer depends on. closed: nodes that the placer may not give. held: jobs that it may not
    move, as they are on their way. now: in seconds. ranks: of those who wait, see people/precedence.py."""

    question: Question
    record: Record
    config: Config
    closed: frozenset[str]
    now: float
    held: frozenset[str] = frozenset()
    ranks: Mapping[str, int] = {}


class Planner:
    """One question at a time, in the order in which they were asked."""

    def __init__(self) -> None:
        self._placer: Placer | None = None
        self._made_for: tuple[Config, frozenset[str], int] | None = None

    def answer(self, asked: Asked, progress: Mapping[str, Progress]) -> Planned:
        placer = self._kept(asked)
        placer.search.held = asked.held
        placer.waiting.ranks, placer.waiting.shares = asked.ranks, asked.config.shares
        self._made_for = None  # until the answer is whole
        said, moves, because = _decide(placer, asked.question, progress, asked.now)
        touched = [placer.groups.get(name) for name in sorted(placer.groups.touched)]
        gone = sorted(name for name in placer.groups.touched if name not in placer.groups)
        placer.groups.touched.clear()
        self._made_for = (asked.config, asked.closed, asked.record.version + 1)
        return Planned(
            version=asked.record.version,
            changed=[group for group in touched if group is not None],
            gone=gone,
            waiting=[Queued(job, passed) for job, passed in placer.waiting.entries],
            named=placer.groups.named,
            moves=moves,
            said=said,
            moved_at=list(placer.moved_at),
            pending=placer.pending,
            wants=_wants(asked, placer, progress),
            because=because,
        )

    def _kept(self, asked: Asked) -> Placer:
        before = self._made_for
        config, closed, version = before if before is not None else (None, None, None)
        if self._placer is None or config is not asked.config or (closed, version) != (asked.closed, asked.record.version):
            cluster = msgspec.structs.replace(asked.config.cluster, closed=asked.closed)
            self._placer = restore(asked.record, cluster, asked.config.placing.rules())
        return self._placer


def _wants(asked: Asked, placer: Placer, progress: Mapping[str, Progress]) -> list[shortage.Want] | None:
    """Nodes that are lacking, where somebody is to be told: for who waits with every answer, for moves when these are due."""
    config, moves = asked.config, isinstance(asked.question, Again)
    if config.on_nodes_wanted is None or not (moves or len(placer.waiting)):
        return None if config.on_nodes_wanted is None else []
    record = Record(
        groups=tuple(placer.groups.values()),
        waiting=tuple(Queued(job, passed) for job, passed in placer.waiting.entries),
        named=placer.groups.named,
        moved_at=tuple(placer.moved_at),
    )
    more = _more(config.pools[config.placing.rollout]), _more(config.pools[config.placing.train])
    return shortage.wants(record, placer.cluster, placer.rules, more, progress, asked.now, asked.held, moves)


def _more(pool: Pool) -> shortage.More:
    room = WANTED_AT_ONCE if pool.most is None else max(pool.most - len(pool.nodes), 0)
    return shortage.More(min(room, WANTED_AT_ONCE), pool.delay)


def nothing_follows(asked: Asked) -> Planned:
    """The answer to a question that could not be answered."""
    record = asked.record
    return Planned(
        version=record.version,
        changed=[],
        gone=[],
        waiting=list(record.waiting),
        named=record.named,
        moved_at=list(record.moved_at),
    )


def _decide(
    placer: Placer, question: Question, progress: Mapping[str, Progress], now: float
) -> tuple[list[Said], list[Move], str]:
    """What to log, who starts or moves, and of who came, why it is where it is."""
    if isinstance(question, Arrive):
        arrived, because = _arrive(placer, question.job, progress)
        return [arrived], [], because
    moves: Sequence[Move] = ()
    actions: Sequence[Action] = ()
    if isinstance(question, Open):
        moves = placer.start_waiting(progress)
    elif isinstance(question, Vacate):
        moves = placer.vacate(question.node, progress)
    elif isinstance(question, Again):
        moves = placer.repack(progress, now)
    elif isinstance(question, Leave) and (question.name in placer.groups.home or question.name in placer.waiting):
        moves = placer.depart(question.name, progress, now)
    elif isinstance(question, Correct) and question.job.name in placer.groups.home:
        revision = placer.revise(question.job, progress, now)
        moves, actions = revision.moves, revision.actions
    said = [Said(events.SLO_AT_RISK, _about(action)) for action in actions]
    started = [move for move in moves if move.kind == "start"]
    placed = [{"job": move.job, "outcome": "placed", "group": move.group, "nodes": _sides(move)} for move in started]
    return [*said, *(Said(events.PLACED, about) for about in placed)], list(moves), ""


def _arrive(placer: Placer, spec: JobSpec, progress: Mapping[str, Progress]) -> tuple[Said, str]:
    could = alternatives(placer, spec, TOLD)
    found = sentences.advice(placer, spec, could, TOLD)
    decision = placer.admit(spec, progress)
    others = [place for place in could if (place.group, place.strategy) != decision.was]
    return _said(decision, spec, lost_to(decision.usd_per_hour, others)), sentences.because(decision, spec, could, found)


def _about(action: Action) -> dict[str, str]:
    return {"kind": action.kind, "group": action.group, "job": action.job, "reason": action.reason}


def _said(decision: Decision, spec: JobSpec, others: Sequence[Alternative]) -> Said:
    """The decision, what was estimated, and why each alternative lost."""
    about = {name: getattr(decision, name) for name in ("job", "outcome", "strategy", "group", "usd_per_hour", "wait")}
    estimated = {"rollout_s": spec.rollout.seconds, "train_s": spec.train.seconds, "source": spec.rollout.source}
    memory = {"rollout_memory_gb": spec.rollout_memory_gb, "train_memory_gb": spec.train_memory_gb}
    lost = [{"group": place.group, "strategy": place.strategy, "why": place.why} for place in others]
    return Said(events.PLACED, {**about, "nodes": _sides(decision), "estimated": {**estimated, **memory}, "alternatives": lost})


def _sides(where: Decision | Move) -> dict[str, list[str]]:
    return {"rollout": list(where.rollout), "train": list(where.train)}
