"""What leases show about a placed job: how long its phases take, where it stands, which periods its group should have, and why it
is where it is.

Runs in the coordinator, called by placing.py, moving.py and snapshot.py; pure, writes to the `Watched` of a job alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from verl_mux.coordinator.core.records import Instruction, Job, JobState, Lease, Log, Moving, Request, State, Watched
from verl_mux.coordinator.core.settings import Config
from verl_mux.placement.estimator import LEAST, Observed, estimate_error, expected
from verl_mux.placement.explain import where
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.model import Group, JobSpec, Pin
from verl_mux.placement.planner import pair_of
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
    return [Log(events.ESTIMATE_ERROR, estimate_error(spec, lease.phase, held), step=lease.step)]


def is_known(watched: Watched, lease: Lease) -> bool:
    """Whether with this phase the job was seen long enough for others of its group to be moved."""
    return lease.phase == "train" and watched.observed.steps == LEAST


def with_move_cost(watched: Watched, spec: JobSpec) -> JobSpec:
    """What its last move took is what the next one is taken to take."""
    if watched.move_s is None or spec.move_s == watched.move_s:
        return spec
    return msgspec.structs.replace(spec, move_s=watched.move_s)


class Standing(Mapping[str, Progress]):
    """Where the placed jobs stand, computed job by job when it is read. A job before its first step is not in it: it is not
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


def expected_job(job: JobSpec, watched: Watched) -> JobSpec:
    """With the median times of the steps since its group changed; with those it is placed by, where there are none."""
    seen, last = watched.observed, watched.fresh
    if last == 0:
        return job
    recent = Observed(rollout=seen.rollout[-last:], train=seen.train[-last:], between=seen.between[-last:])
    return expected(job, recent)


def expected_group(group: Group, state: State) -> Group:
    pins = tuple(
        Pin(job=expected_job(pin.job, state.watched_of(pin.job.name)), rollout=pin.rollout, train=pin.train) for pin in group.pins
    )
    return msgspec.structs.replace(group, pins=pins)


def predict(group: Group, state: State) -> dict[str, float]:
    """Seconds per step of each job, by name."""
    return {job.name: period.mean_s for job, period in zip(group.jobs, group_periods(expected_group(group, state)), strict=True)}


def source(group: Group, state: State, config: Config) -> str:
    """`observed` once every job of the group was seen for as many steps as the configuration asks; else `estimated`."""
    fresh = (state.watched_of(job.name).fresh for job in group.jobs)
    return "observed" if all(steps >= config.placing.observe for steps in fresh) else "estimated"


def is_due(group: Group, job: Job, state: State, config: Config) -> bool:
    """Whether this step of the job was the last that the first prediction from observations waited for."""
    mine = state.watched_of(job.name).fresh == config.placing.observe
    others_later = all(state.watched_of(other.name).fresh >= config.placing.observe for other in group.jobs)
    return mine and others_later


def predicted(group: Group, state: State, config: Config) -> Log:
    """The line for the event log, against which the periods that follow are held."""
    return Log(events.GROUP_PREDICTED, {"group": group.name, **about(group, state, config)})


def about(group: Group, state: State, config: Config) -> dict[str, Any]:
    """A group in figures: seconds per step of every job, predicted and at most allowed, and USD per hour."""
    pair = pair_of(group.rollout_nodes, group.train_nodes, config.clusters)
    return {
        "nodes": {"rollout": list(group.rollout_nodes), "train": list(group.train_nodes)},
        "order": group.order,
        "usd_per_hour": group.usd_per_hour(config.clusters[pair]),
        "source": source(group, state, config),
        "periods": predict(group, state),
        "limits": {job.name: job.limit_s for job in group.jobs},
    }


def reasons(state: State, config: Config) -> dict[str, str]:
    """Of all jobs that run or wait to be placed, by name."""
    on: dict[str, dict[str, None]] = {}
    jobs = [job for job in state.jobs.values() if job.state in (JobState.LIVE, JobState.SILENT) and not job.filler]
    for job in jobs:
        for node in job.all_nodes:
            on.setdefault(node, {})[job.name] = None
    found = {job.name: _sentence(job, on, state, config) for job in jobs}
    return {name: sentence for name, sentence in found.items() if sentence}


def _sentence(job: Job, on: dict[str, dict[str, None]], state: State, config: Config) -> str:
    if job.watched is None:
        return _named(job, on, config) if job.nodes else ""
    if not job.nodes:
        return f"{job.name} waits to be placed{_colon(job.watched.because)}"
    reason = job.watched.because
    return f"{_where_on(job, on)}{f', {reason}' if reason else ''}"


def _where_on(job: Job, on: dict[str, dict[str, None]]) -> str:
    return where(job.name, job.all_nodes, {node: [name for name in on[node] if name != job.name] for node in job.all_nodes})


def _named(job: Job, on: dict[str, dict[str, None]], config: Config) -> str:
    said = f"{_where_on(job, on)}, as it names {'these nodes' if len(job.all_nodes) > 1 else 'this node'}"
    prices = [config.price(node) for node in job.all_nodes]
    cost = sum(price for price in prices if price is not None)
    said += f", which cost {cost:.2f} USD/h" if None not in prices else ""
    return f"{said}; to be put where it adds the least, let the coordinator choose (mux.nodes=auto)" if config.placement else said


def _colon(reason: str) -> str:
    return f": {reason}" if reason else ""
