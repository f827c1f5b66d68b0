"""Running jobs that go to other nodes.

    decided -> sent with every answer to a heartbeat -> it saved at the end of its step, and left -> started again by its launcher
    -> its first step there: the move is over, and its duration is known

From the decision on the placer has the job on its new nodes, so they are kept for it. The job that gets the old ones learns of
them when it has left them. A job that dies, finishes, or does not come back within MOVE_TIMEOUT_S has lost its place.
Runs in the coordinator, called by placing.py; pure, changes `State.moves`.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import observing
from verl_mux.coordinator.core.records import (
    Instruction,
    Job,
    JobState,
    Log,
    MoveGivenUp,
    MovesDue,
    Moving,
    Request,
    State,
    Watched,
    What,
)
from verl_mux.coordinator.core.settings import MOVE_TIMEOUT_S, Config
from verl_mux.placement.search import Move
from verl_mux.profiling.eventlog import events

_AT_WORK = (JobState.LIVE, JobState.SILENT)


def decided(state: State, move: Move, now: float) -> list[Instruction]:
    """The job is to leave, unless it is over, or has no nodes yet, or the nodes are those that it has: then what
    changed is with whom it shares them and in which order, and it goes on."""
    job = state.jobs.get(move.job)
    to = {"rollout": list(move.rollout), "train": list(move.train)}
    if job is None or job.state not in _AT_WORK or not job.nodes or all(set(to[side]) == set(job.nodes[side]) for side in to):
        return []
    state.num_moves += 1
    state.moves[job.name] = Moving(number=state.num_moves, since=now, before=job.nodes, uid=job.uid)
    about = {"job": job.name, "number": state.num_moves, "nodes": to, "before": job.nodes, "group": move.group}
    return [Log(events.MOVE_ASKED, {**about, "expected_s": move.load_s})]


def asked_of(state: State, job: Job) -> int:
    """The number of the move that the job is to make; 0: none."""
    moving = state.moves.get(job.name)
    return moving.number if moving is not None and moving.left_at is None else 0


def leaves(state: State, job: Job, what: m.Deregister, now: float) -> None:
    """The job says that it leaves for its move; one of which nothing is known here is none."""
    if job.watched is None or not what.moving or what.moving != asked_of(state, job):
        return
    moving = state.moves[job.name]
    moving.left_at, moving.done, moving.saving_s = now, what.step, what.saving_s
    moving.ended_at = now if job.watched.free_since is None else job.watched.free_since
    moving.watched = _copied(job.watched)


def in_the_way(state: State, name: str, nodes: Collection[str]) -> list[str]:
    """Other jobs that have yet to leave one of these nodes."""
    return [
        other
        for other, moving in state.moves.items()
        if other != name and moving.left_at is None and not {n for side in moving.before.values() for n in side}.isdisjoint(nodes)
    ]


def comes_back(state: State, job: Job) -> bool:
    """Of a job that ended: it left for its move, or on its return only asked whether it would be taken."""
    moving = state.moves.get(job.name)
    if moving is None or moving.left_at is None:
        return False
    return job.uid == moving.uid or not (job.has_asked or job.died_at is not None)


def returns(state: State, job: Job, asked: m.Register) -> bool:
    """Whether this start of the job is the one that its place is kept for; it then goes on from what was learnt of it."""
    moving, group = state.moves.get(job.name), state.placed.group_of(job.name)
    if moving is None or moving.left_at is None or group is None or asked.needs is None:
        return False
    pin = next(pin for pin in group.pins if pin.job.name == job.name)
    if (len(pin.runs_rollouts_on), len(pin.train)) != (asked.needs.rollout_nodes, asked.needs.train_nodes):
        return False
    if pin.job.colocated != asked.colocated:
        return False
    job.watched = _copied(moving.watched)
    return True


def begins(state: State, config: Config, job: Job, what: Request, now: float) -> list[Instruction]:
    """A phase is asked for: of a job that came back, the first of a step that it had not done is the end of its move."""
    moving = state.moves.get(job.name)
    validates = moving is not None and what.phase == "rollout" and what.step <= moving.done
    if moving is None or moving.left_at is None or job.watched is None or what.step < 1 or validates:
        return []
    del state.moves[job.name]
    took_s = now - moving.ended_at + moving.saving_s
    job.watched.move_s = took_s
    # As after any start, the first step finds nothing compiled or allocated.
    job.watched.steps = dict.fromkeys(("rollout", "train", "between"), what.step)
    about = {"job": job.name, "number": moving.number, "nodes": job.nodes, "before": moving.before, "done": moving.done}
    out: list[Instruction] = [Log(events.JOB_MOVED, about, duration=took_s, step=what.step)]
    if (group := state.placed.group_of(job.name)) is not None:
        for each in group.jobs:  # the group is together from here on
            state.watched_of(each.name).fresh = 0
        out.append(observing.predicted(group, state, config))
    return out


def given_up(state: State, name: str, reason: str) -> list[Instruction]:
    """Whatever becomes of the job, it is not on its way any more."""
    moving = state.moves.pop(name, None)
    return [] if moving is None else [Log(events.MOVE_GIVEN_UP, {"job": name, "number": moving.number, "reason": reason})]


def due(state: State, now: float, since: float) -> list[What]:
    """What is due by now. since: when this start of the coordinator began, before which no job could come back."""
    out: list[What] = []
    for name, moving in state.moves.items():
        job = state.jobs.get(name)
        is_away = moving.left_at is not None and (job is None or job.state is JobState.ENDED)
        if is_away and now - max(moving.left_at or 0.0, since) > MOVE_TIMEOUT_S:
            out.append(MoveGivenUp(job=name))
    if state.ask_again_at is not None and now >= state.ask_again_at:
        out.append(MovesDue())
    return out


def sentences(state: State, now: float) -> dict[str, str]:
    """Each move in a sentence, by job."""
    return {name: _sentence(state, name, moving, now) for name, moving in state.moves.items()}


def _sentence(state: State, name: str, moving: Moving, now: float) -> str:
    group, job = state.placed.group_of(name), state.jobs.get(name)
    pin = next((pin for pin in group.pins if pin.job.name == name), None) if group is not None else None
    where = f"moves to {', '.join([*pin.rollout, *pin.train])}" if pin is not None else "moves"
    if moving.left_at is None:
        return f"{where}: asked {now - moving.since:.0f} s ago, it leaves at the end of its step"
    if job is None or job.state is JobState.ENDED:
        return f"{where}: it left {now - moving.left_at:.0f} s ago after step {moving.done}, and its place is kept"
    return f"{where}: it came back and has yet to begin step {moving.done + 1}"


def _copied(watched: Watched) -> Watched:
    """As a start of the job that asks for its first nodes has it."""
    return msgspec.structs.replace(watched, steps=dict(watched.steps), free_since=None, between=0.0)
