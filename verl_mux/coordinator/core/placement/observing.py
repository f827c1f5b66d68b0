"""What leases tell about a placed job's phases: how long it held its nodes, and where it stands now. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from verl_mux.coordinator.core.inputs_and_instructions import Instruction, Log
from verl_mux.coordinator.core.records import Job, Lease, Moving, Request, State, Watched
from verl_mux.placement.estimator import LEAST, estimate_error
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.model import JobSpec
from verl_mux.profiling.eventlog import events

# The first step compiles, allocates and loads what later ones find.
FIRST = 2


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
    if request.phase == "rollout" and request.step > watched.steps.get("between", FIRST):
        watched.observed = watched.observed.seen("between", watched.between)
        watched.steps["between"] = request.step
    if request.phase == "rollout":
        watched.alone_s += watched.between
        watched.between = 0.0


def counted(watched: Watched, lease: Lease, now: float) -> None:
    """A phase is over: what finished steps took without waiting is what they would have taken alone."""
    watched.step_s += now - lease.granted_at
    if lease.phase == "train":
        watched.alone_s += watched.step_s
        watched.step_s = 0.0


def released(watched: Watched, lease: Lease, spec: JobSpec, now: float) -> list[Instruction]:
    """A phase is over: it is remembered, and held against what was estimated. A validation, which comes after the
    step's own rollout, is not."""
    watched.free_since = now
    watched.doing = ("train" if lease.phase == "rollout" else "rollout"), now, False
    if lease.step < FIRST or lease.step <= watched.steps.get(lease.phase, 0):
        return []
    held = now - lease.granted_at
    watched.steps[lease.phase] = lease.step
    watched.observed = watched.observed.seen(lease.phase, held)
    if lease.phase == "train":
        watched.fresh += 1
    error = estimate_error(spec, lease.phase, held)
    about = {name: getattr(error, name) for name in ("job", "phase", "source", "estimated_s", "observed_s", "ratio")}
    return [Log(events.ESTIMATE_ERROR, about, step=lease.step)]


def is_known(watched: Watched, lease: Lease) -> bool:
    """Whether with this phase the job was seen long enough for others of its group to be moved."""
    return lease.phase == "train" and watched.observed.steps == LEAST


def with_move_cost(watched: Watched, spec: JobSpec) -> JobSpec:
    """What its last move took is what the next one is taken to take."""
    if watched.move_s is None or spec.move_s == watched.move_s:
        return spec
    return msgspec.structs.replace(spec, move_s=watched.move_s)


class Standing(Mapping[str, Progress]):
    """Where the placed jobs stand, found out job by job when it is asked for. A job before its first step is not in it: nobody
    knows how long it still loads. It may be read while the records go on changing: what is forecast from it is as good as when
    it was read."""

    def __init__(self, state: State, now: float) -> None:
        self._state = state
        self._placed = state.placed
        self._now = now

    def __getitem__(self, name: str) -> Progress:
        spec, moving, job = self._placed.job(name), self._state.moves.get(name), self._state.jobs.get(name)
        watched = self._state.watched_of(name)
        if spec is None or watched.began is None:
            raise KeyError(name)
        if moving is not None:
            finished = job.finished if job is not None and moving.left_at is None else moving.done
            stands = _on_its_way(moving, watched, watched.began, max(finished - watched.first_step + 1, 0), spec, self._now)
            return stands if job is None else msgspec.structs.replace(stands, left=_left(job, finished))
        if job is None:
            raise KeyError(name)
        return _progress(job, watched, watched.began, spec, self._now)

    def __iter__(self) -> Iterator[str]:
        return (job.name for group in self._placed.groups for job in group.jobs if job.name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def granted(watched: Watched, phase: str, now: float) -> None:
    if phase in ("rollout", "train"):
        watched.doing = phase, now, True


def _on_its_way(moving: Moving, watched: Watched, began: float, done: int, spec: JobSpec, now: float) -> Progress:
    away_s = 0.0 if moving.left_at is None else now - moving.ended_at
    remaining_s = max(spec.load_s - away_s, 0.0)
    return Progress(age_s=now - began, done=done, phase="loading", remaining_s=remaining_s, solo_s=watched.alone_s)


def _progress(job: Job, watched: Watched, began: float, spec: JobSpec, now: float) -> Progress:
    phase, since, runs = watched.doing
    age_s, done = now - began, max(job.finished - watched.first_step + 1, 0)
    stands = Progress(
        age_s=age_s, done=done, phase=phase, seen=watched.observed.steps, solo_s=watched.alone_s, left=_left(job, job.finished)
    )
    if not runs:
        return msgspec.structs.replace(stands, waited_s=max(now - since, 0.0))
    planned = spec.rollout_hold_s if phase == "rollout" else spec.train.seconds
    return msgspec.structs.replace(stands, remaining_s=max(planned - (now - since), 0.0))


def _left(job: Job, finished: int) -> int | None:
    return None if job.steps is None else max(job.steps - finished, 0)
