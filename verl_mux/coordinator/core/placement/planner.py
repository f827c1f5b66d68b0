"""Answers what placement is asked, outside the path of leases: whatever this takes, phases are granted meanwhile. Pure.

Runs in the coordinator's placement thread. The planner is kept between answers, and made anew only where the record is not the
one that its last answer made. So an answer may depend on what it remembers; that is why an answer is an input of the state
machine, and as such in the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from verl_mux.coordinator.core.inputs_and_instructions import Planned, Said
from verl_mux.coordinator.core.settings import Config
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.model import JobSpec
from verl_mux.placement.planner import Answer, Planner, Question, Record
from verl_mux.placement.search import Alternative, Decision, Move
from verl_mux.profiling.eventlog import events

# Places of which the log says why they lost; all of them would take longer than the decision.
EXPLAINED = 8


class Asked(msgspec.Struct, frozen=True):
    """One question, and all that the answer depends on. closed: nodes that the placer may not give. held: jobs that it may not
    move, as they are on their way. now: in seconds."""

    question: Question
    record: Record
    config: Config
    closed: frozenset[str]
    now: float
    held: frozenset[str] = frozenset()


class Answerer:
    """Answers one question at a time, in the order in which they were asked."""

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._made_for: tuple[Config, frozenset[str], int] | None = None

    def answer(self, asked: Asked, progress: Mapping[str, Progress]) -> Planned:
        planner = self._kept(asked)
        planner.held = asked.held
        self._made_for = None  # until the answer is whole
        planner.touched.clear()
        found = planner.answer(asked.question, progress, asked.now, EXPLAINED)
        touched = {name: planner.groups.get(name) for name in sorted(planner.touched)}
        self._made_for = (asked.config, asked.closed, asked.record.version + 1)
        return Planned(
            version=asked.record.version,
            changed=[group for group in touched.values() if group is not None],
            gone=[name for name, group in touched.items() if group is None],
            waiting=list(planner.waiting),
            named=planner.named,
            moves=list(found.moves),
            said=_events(found),
            moved_at=list(planner.moved_at),
            pending=planner.pending,
            because=found.because,
        )

    def _kept(self, asked: Asked) -> Planner:
        before = self._made_for
        config, closed, version = before if before is not None else (None, None, None)
        if self._planner is None or config is not asked.config or (closed, version) != (asked.closed, asked.record.version):
            self._planner = Planner(asked.config.clusters, asked.config.placing.rules(), asked.record, asked.closed)
        return self._planner


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


def _events(found: Answer) -> list[Said]:
    """What the event log says about an answer."""
    if found.decision is not None and found.spec is not None:
        return [_placed(found.decision, found.spec, found.decision.alternatives)]
    risks = [Said(events.SLO_AT_RISK, msgspec.structs.asdict(action)) for action in found.actions]
    started = [
        {"job": move.job, "outcome": "placed", "group": move.group, "nodes": _sides(move)}
        for move in found.moves
        if move.kind == "start"
    ]
    return [*risks, *(Said(events.PLACED, about) for about in started)]


def _placed(decision: Decision, spec: JobSpec, others: Sequence[Alternative]) -> Said:
    """The decision, what was estimated, and why each alternative lost."""
    about = {name: getattr(decision, name) for name in ("job", "outcome", "strategy", "group", "usd_per_hour", "wait")}
    estimated = {"rollout_s": spec.rollout.seconds, "train_s": spec.train.seconds, "source": spec.rollout.source}
    memory = {"rollout_memory_gb": spec.rollout_memory_gb, "train_memory_gb": spec.train_memory_gb}
    lost = [{"group": place.group, "strategy": place.strategy, "why": place.why} for place in others]
    return Said(events.PLACED, {**about, "nodes": _sides(decision), "estimated": {**estimated, **memory}, "alternatives": lost})


def _sides(placed: Decision | Move) -> dict[str, list[str]]:
    return {"rollout": list(placed.rollout), "train": list(placed.train)}
