"""What leases tell about a placed job's phases: how long it held its nodes, and where it stands now. Pure."""

from __future__ import annotations

from verl_mux.coordinator.core.inputs_and_instructions import Instruction, Log
from verl_mux.coordinator.core.records import Job, Lease, Request, State, Watched
from verl_mux.profiling.eventlog import events
from verl_mux.scheduling.estimate.estimator import corrected, estimate_error
from verl_mux.scheduling.model import JobSpec
from verl_mux.scheduling.time.forecast import Progress

# A change of estimates by less is not worth another look at everybody's placement.
WORTH = 0.05
# The first step compiles, allocates and loads what later ones find.
FIRST = 2


def asked(job: Job, request: Request) -> None:
    """A phase is asked for: the time since the last one was given back belongs to no phase."""
    watched = job.watched
    if watched is None or request.step < 1:
        return
    if watched.began is None and request.phase == "rollout":
        watched.began, watched.first_step = request.asked_at, request.step
    if watched.free_since is not None:
        watched.between += request.asked_at - watched.free_since
        watched.free_since = None
    if request.phase == "rollout" and request.step > watched.steps.get("between", FIRST):
        watched.observed = watched.observed.seen("between", watched.between)
        watched.steps["between"] = request.step
    if request.phase == "rollout":
        watched.between = 0.0


def released(watched: Watched, lease: Lease, spec: JobSpec, now: float) -> list[Instruction]:
    """A phase is over: it is remembered, and held against what was estimated. A validation, which comes after the
    step's own rollout, is not."""
    watched.free_since = now
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


def revised(watched: Watched, spec: JobSpec) -> JobSpec | None:
    """The job with quantiles of what was seen, if that changes its estimates enough to matter."""
    now = corrected(spec, watched.observed)
    pairs = ((now.rollout_hold_s, spec.rollout_hold_s), (now.train.seconds, spec.train.seconds))
    return now if any(abs(a - b) > WORTH * b for a, b in pairs) else None


def progress(state: State, now: float) -> dict[str, Progress]:
    """Where the placed jobs stand. A job before its first step is left out: nobody knows how long it still loads."""
    found = {}
    for group in state.placed.groups:
        for spec in group.jobs:
            job = state.jobs[spec.name]
            if job.watched is not None and job.watched.began is not None:
                found[spec.name] = _progress(job, job.watched, now - job.watched.began, spec, state, now)
    return found


def _progress(job: Job, watched: Watched, age_s: float, spec: JobSpec, state: State, now: float) -> Progress:
    done = max(job.finished - watched.first_step + 1, 0)
    lease = next((lease for lease in state.leases_of(job.name) if lease.phase in ("rollout", "train")), None)
    if lease is not None:
        planned = spec.rollout_hold_s if lease.phase == "rollout" else spec.train.seconds
        left = max(planned - (now - lease.granted_at), 0.0)
        return Progress(age_s=age_s, done=done, phase=lease.phase, remaining_s=left)
    request = next((request for request in state.requests if request.job == job.name and request.step > 0), None)
    if request is not None:
        return Progress(age_s=age_s, done=done, phase=request.phase, waited_s=now - request.asked_at)
    trained = watched.steps.get("train", 0) >= watched.steps.get("rollout", 0)
    return Progress(age_s=age_s, done=done, phase="rollout" if trained else "train")
