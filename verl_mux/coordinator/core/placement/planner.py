"""Answers what placement is asked, outside the path of leases: whatever this takes, phases are granted meanwhile. Pure.

Placers are kept between answers, and made anew only where the record is not the one that their last answer made. So what they
answer may depend on what they remember; that is why an answer is an input of the state machine, and as such in the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from verl_mux.coordinator.core.inputs_and_instructions import Planned, Said
from verl_mux.coordinator.core.settings import Config
from verl_mux.placement import explain as sentences
from verl_mux.placement.explain import lost_to, price
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.model import JobSpec
from verl_mux.placement.pool_pairs import Again, Arrive, Leave, Open, PoolPairs, Question, Record, Vacate, by_price
from verl_mux.placement.search import Action, Alternative, Decision, Move
from verl_mux.profiling.eventlog import events

# Places of which the log says why they lost; all of them would take longer than the decision.
TOLD = 8


class Asked(msgspec.Struct, frozen=True):
    """One question, and all that the answer depends on. closed: nodes that the placer may not give. held: jobs that it may not
    move, as they are on their way. now: in seconds."""

    question: Question
    record: Record
    config: Config
    closed: frozenset[str]
    now: float
    held: frozenset[str] = frozenset()


class Planner:
    """One question at a time, in the order in which they were asked."""

    def __init__(self) -> None:
        self._pairs: PoolPairs | None = None
        self._made_for: tuple[Config, frozenset[str], int] | None = None

    def answer(self, asked: Asked, progress: Mapping[str, Progress]) -> Planned:
        pairs = self._kept(asked)
        pairs.held = asked.held
        self._made_for = None  # until the answer is whole
        pairs.touched.clear()
        said, moves, because = _decide(pairs, asked.question, progress, asked.now)
        touched = {name: pairs.group(name) for name in sorted(pairs.touched)}
        self._made_for = (asked.config, asked.closed, asked.record.version + 1)
        return Planned(
            version=asked.record.version,
            changed=[group for group in touched.values() if group is not None],
            gone=[name for name, group in touched.items() if group is None],
            waiting=list(pairs.waiting),
            named=pairs.named,
            moves=moves,
            said=said,
            moved_at=list(pairs.moved_at),
            pending=pairs.pending,
            because=because,
        )

    def _kept(self, asked: Asked) -> PoolPairs:
        before = self._made_for
        config, closed, version = before if before is not None else (None, None, None)
        if self._pairs is None or config is not asked.config or (closed, version) != (asked.closed, asked.record.version):
            self._pairs = PoolPairs(asked.config.clusters, asked.config.placing.rules(), asked.record, asked.closed)
        return self._pairs


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
    pairs: PoolPairs, question: Question, progress: Mapping[str, Progress], now: float
) -> tuple[list[Said], list[Move], str]:
    """What to log, who starts or moves, and of who came, why it is where it is."""
    if isinstance(question, Arrive):
        arrived, because = _arrive(pairs, question, progress)
        return [arrived], [], because
    moves: Sequence[Move] = ()
    actions: Sequence[Action] = ()
    if isinstance(question, Open):
        moves = pairs.start_waiting(progress)
    elif isinstance(question, Vacate):
        moves = pairs.vacate(question.node, progress)
    elif isinstance(question, Again):
        moves = pairs.repack(progress, now)
    elif isinstance(question, Leave):
        moves = pairs.depart(question.name, progress, now)
    else:
        revision = pairs.revise(question.job, progress, now)
        moves, actions = revision.moves, revision.actions
    said = [Said(events.SLO_AT_RISK, _about(action)) for action in actions]
    started = [move for move in moves if move.kind == "start"]
    placed = [{"job": move.job, "outcome": "placed", "group": move.group, "nodes": _sides(move)} for move in started]
    return [*said, *(Said(events.PLACED, about) for about in placed)], list(moves), ""


def _arrive(pairs: PoolPairs, came: Arrive, progress: Mapping[str, Progress]) -> tuple[Said, str]:
    specs = {came.pair or next(iter(pairs.clusters)): came.job, **came.elsewhere}
    could = pairs.ways(specs, TOLD)
    usd = by_price(specs, could)
    best = next(iter(usd))
    with pairs.of(best) as placer:
        found = sentences.advice(placer, specs[best], could[best], TOLD)
    pair, decision = pairs.admit(specs, usd, progress)
    others = [place for place in could[pair] if (place.group, place.strategy) != decision.was]
    lost = [*lost_to(decision.usd_per_hour, others), *_in_other_pairs(pair, could, usd)]
    because = sentences.because(decision, specs[pair], could[pair], found if pair == best else None)
    return _said(decision, specs[pair], lost), because + sentences.in_other_pairs(pair, usd)


def _in_other_pairs(pair: str, could: Mapping[str, Sequence[Alternative]], usd: Mapping[str, float]) -> list[Alternative]:
    """Of each the cheapest place, with why that was not taken."""
    found = []
    for other in [other for other in could if other != pair]:
        place = min(could[other], key=lambda place: (bool(place.why), price(place)))
        why = place.why or f"as much work costs {usd[other]:.2f} USD/h there"
        found.append(msgspec.structs.replace(place, why=f"on {other}: {why}"))
    return found


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
