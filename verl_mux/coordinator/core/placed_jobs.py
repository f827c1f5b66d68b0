"""Jobs that the placer has placed, as they run and as they move: how long their phases take, where each job stands, which periods
its group should have, and its way to other nodes.

    move decided -> sent with every answer to a heartbeat -> the job saved at the end of its step, and left -> started again by
    its launcher -> its first step there: the move is over, and its duration is known

From the decision on the placer has the job on its new nodes, so they are kept for it. The job that gets the old nodes learns of
them when the moving job has left them. A job that dies, finishes, or does not come back within MOVE_TIMEOUT_S has lost its place.
Runs in the coordinator, called by placing.py and snapshot.py; pure, changes `State.moves` and the `Watched` of jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import records as r
from verl_mux.coordinator.core.records import RUNNING, Instruction, Job, JobState, Lease, Log, Request, State, Watched, What
from verl_mux.coordinator.core.settings import Config
from verl_mux.placement.estimator import Observed, estimate_error, expected
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.model import Group, JobSpec
from verl_mux.placement.placer import Move
from verl_mux.placement.planner import pair_of
from verl_mux.profiling.eventlog import events

# The first step compiles, allocates and loads what later ones find.
FIRST = 2
# For this long its new nodes are kept for a job that left to move and does not come back.
MOVE_TIMEOUT_S = 1800.0

# --- what leases show of a job ---


def asked(job: Job, request: Request) -> None:
    """A phase is asked for: the time since the last one was given back belongs to no phase."""
    watched = job.watched
    if watched is None or request.step < 1:
        return
    if watched.began is None and request.phase == "rollout":
        watched.began, watched.first_step = request.asked_at, request.step
    watched.doing = request.phase, request.asked_at, False
    if watched.free_since is not None:
        watched.between += request.asked_at - watched.free_since
        watched.free_since = None
    if request.phase == "rollout":
        if request.step > watched.steps.get("between", FIRST):
            watched.observed = watched.observed.seen("between", watched.between)
            watched.steps["between"] = request.step
        watched.alone_s += watched.between
        watched.between = 0.0


def counted(watched: Watched, lease: Lease, now: float) -> None:
    """A phase is over: what finished steps took without waiting is what they would have taken alone."""
    watched.step_s += now - lease.granted_at
    if lease.phase == "train":
        watched.alone_s += watched.step_s
        watched.step_s = 0.0


def released(watched: Watched, lease: Lease, spec: JobSpec, now: float) -> list[Instruction]:
    """A phase is over: its duration is remembered, and compared with the estimate. A validation, which comes after the step's
    own rollout, is not."""
    watched.free_since = now
    watched.doing = ("train" if lease.phase == "rollout" else "rollout"), now, False
    if lease.step < FIRST or lease.step <= watched.steps.get(lease.phase, 0):
        return []
    held = now - lease.granted_at
    watched.steps[lease.phase] = lease.step
    watched.observed = watched.observed.seen(lease.phase, held)
    watched.fresh += lease.phase == "train"
    return [Log(events.ESTIMATE_ERROR, estimate_error(spec, lease.phase, held), step=lease.step)]


class Standing(Mapping[str, Progress]):
    """Where the placed jobs stand, computed job by job when it is read. A job before its first step is not in it: its loading
    time is not known. The placer's thread reads it while the records change: a forecast is as good as the moment of reading."""

    def __init__(self, state: State, now: float) -> None:
        self._state, self._placed, self._now = state, state.placed, now

    def __getitem__(self, name: str) -> Progress:
        spec, moving, job = self._placed.job(name), self._state.moves.get(name), self._state.jobs.get(name)
        watched = self._state.watched_of(name)
        if spec is None or watched.began is None:
            raise KeyError(name)
        if job is not None and (moving is None or moving.left_at is None):
            finished = job.finished
        elif moving is not None:
            finished = moving.done
        else:
            raise KeyError(name)
        phase, since, runs = watched.doing
        stands = Progress(
            age_s=self._now - watched.began,
            done=max(finished - watched.first_step + 1, 0),
            phase=phase if moving is None else "loading",
            solo_s=watched.alone_s,
            left=None if job is None or job.steps is None else max(job.steps - finished, 0),
        )
        if moving is not None:
            away_s = 0.0 if moving.left_at is None else self._now - moving.ended_at
            return msgspec.structs.replace(stands, remaining_s=max(spec.load_s - away_s, 0.0))
        seen = watched.observed.steps
        if not runs:
            return msgspec.structs.replace(stands, seen=seen, waited_s=max(self._now - since, 0.0))
        planned = spec.rollout_hold_s if phase == "rollout" else spec.train.seconds
        return msgspec.structs.replace(stands, seen=seen, remaining_s=max(planned - (self._now - since), 0.0))

    def __iter__(self) -> Iterator[str]:
        return (job.name for group in self._placed.groups for job in group.jobs if job.name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


# --- what is predicted of a group ---


def _expected_job(job: JobSpec, watched: Watched) -> JobSpec:
    """With the median times of the steps since its group changed; with those it is placed by, where there are none."""
    seen, last = watched.observed, watched.fresh
    if last == 0:
        return job
    return expected(job, Observed(rollout=seen.rollout[-last:], train=seen.train[-last:], between=seen.between[-last:]))


def _periods(group: Group, state: State) -> dict[str, float]:
    """Predicted seconds per step of each job, by name."""
    pins = [msgspec.structs.replace(pin, job=_expected_job(pin.job, state.watched_of(pin.job.name))) for pin in group.pins]
    return group_periods(msgspec.structs.replace(group, pins=tuple(pins)))


def is_due(group: Group, job: Job, state: State, config: Config) -> bool:
    """Whether this step of the job was the last that the first prediction from observations waited for."""
    fresh = {other.name: state.watched_of(other.name).fresh for other in group.jobs}
    return fresh[job.name] == config.placing.observe and min(fresh.values()) >= config.placing.observe


def predicted(group: Group, state: State, config: Config) -> Log:
    """The line for the event log, with which the periods that follow are compared."""
    return Log(events.GROUP_PREDICTED, {"group": group.name, **about(group, state, config)})


def about(group: Group, state: State, config: Config) -> dict[str, Any]:
    """A group in figures: seconds per step of every job, predicted and at most allowed, and USD per hour. `source`: `observed`
    once every job of the group was seen for as many steps as the configuration asks."""
    pair = pair_of(group.rollout_nodes, group.train_nodes, config.clusters)
    is_observed = all(state.watched_of(job.name).fresh >= config.placing.observe for job in group.jobs)
    return {
        "nodes": {"rollout": list(group.rollout_nodes), "train": list(group.train_nodes)},
        "order": group.order,
        "usd_per_hour": group.usd_per_hour(config.clusters[pair]),
        "source": "observed" if is_observed else "estimated",
        "periods": _periods(group, state),
        "limits": {job.name: job.limit_s for job in group.jobs},
    }


# --- a job on its way to other nodes ---


def move_decided(state: State, move: Move, now: float) -> list[Instruction]:
    """The job is to leave, unless it is over, or has no nodes yet, or the nodes are those that it has: then what
    changed is with which jobs it shares them and in which order, and it goes on."""
    job = state.jobs.get(move.job)
    to = {"rollout": list(move.rollout), "train": list(move.train)}
    if job is None or job.state not in RUNNING or not job.nodes or all(set(to[side]) == set(job.nodes[side]) for side in to):
        return []
    state.num_moves += 1
    state.moves[job.name] = r.Moving(number=state.num_moves, since=now, before=job.nodes, uid=job.uid)
    extra = {"job": job.name, "number": state.num_moves, "nodes": to, "before": job.nodes, "group": move.group}
    return [Log(events.MOVE_ASKED, {**extra, "expected_s": move.load_s})]


def move_of(state: State, job: Job) -> int:
    """The number of the move that the job is to make; 0: none."""
    moving = state.moves.get(job.name)
    return moving.number if moving is not None and moving.left_at is None else 0


def leaves(state: State, job: Job, what: m.Deregister, now: float) -> None:
    """The job says that it leaves for its move; a move that is not on record is none."""
    if job.watched is None or not what.moving or what.moving != move_of(state, job):
        return
    moving = state.moves[job.name]
    moving.left_at, moving.done, moving.saving_s = now, what.step, what.saving_s
    moving.ended_at = now if job.watched.free_since is None else job.watched.free_since
    moving.watched = _copied(job.watched)


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
    pin = group.pin_of(job.name)
    wanted = (asked.needs.rollout_nodes, asked.needs.train_nodes, asked.colocated)
    if (len(pin.runs_rollouts_on), len(pin.train), pin.job.colocated) != wanted:
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
    extra = {"job": job.name, "number": moving.number, "nodes": job.nodes, "before": moving.before, "done": moving.done}
    out: list[Instruction] = [Log(events.JOB_MOVED, extra, duration=took_s, step=what.step)]
    if (group := state.placed.group_of(job.name)) is not None:
        for each in group.jobs:  # the group is together from here on
            state.watched_of(each.name).fresh = 0
        out.append(predicted(group, state, config))
    return out


def given_up(state: State, name: str, reason: str) -> list[Instruction]:
    """The job is no longer on its way, whatever becomes of it."""
    moving = state.moves.pop(name, None)
    return [] if moving is None else [Log(events.MOVE_GIVEN_UP, {"job": name, "number": moving.number, "reason": reason})]


def is_away(moving: r.Moving, job: Job | None) -> bool:
    return moving.left_at is not None and (job is None or job.state is JobState.ENDED)


def due(state: State, now: float, since: float) -> list[What]:
    """`since`: when this start of the coordinator began, before which no job could come back."""
    away = [(name, moving.left_at or 0.0) for name, moving in state.moves.items() if is_away(moving, state.jobs.get(name))]
    out: list[What] = [r.MoveGivenUp(job=name) for name, left_at in away if now - max(left_at, since) > MOVE_TIMEOUT_S]
    return out + ([r.MovesDue()] if state.ask_again_at is not None and now >= state.ask_again_at else [])


def _copied(watched: Watched) -> Watched:
    """As a start of the job that asks for its first nodes has it."""
    return msgspec.structs.replace(watched, steps=dict(watched.steps), free_since=None, between=0.0)
