"""Jobs that took turns, run again on one clock, with leases by the coordinator's own rules.

Runs on the command line; called by advice.py. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.records import Job, Lease, State
from verl_mux.coordinator.core.records import Request as LeaseRequest
from verl_mux.coordinator.core.settings import Config, Mode
from verl_mux.coordinator.core.settings import Segment as ScheduleSegment
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.measures.lease_times import Hold, Leases, Segment
from verl_mux.rollout.control.replica_plan import (
    Migration,
    MigrationPolicy,
    Replica,
    Request,
    estimated_speed,
    expected_remaining,
    plan,
)
from verl_mux.what_if.recorded_run import Recording, Settings, changed
from verl_mux.what_if.rerun import Key, Rerun
from verl_mux.what_if.what_if import MAX_SAMPLES, RESAMPLED, WhatIf, interval_of


class LeaseQueue:
    """ask -> (granted -> give_back)*. nodes: of each job by side, in the order in which the jobs came. steps: of each."""

    def __init__(self, nodes: Mapping[str, Mapping[str, Sequence[str]]], steps: Mapping[str, int], mode: Mode) -> None:
        jobs = {
            name: Job(
                name=name, uid=name, order=order, since=0.0, nodes={side: list(its) for side, its in sides.items()},
                steps=steps[name], asked=1, has_asked=True,
            )
            for order, (name, sides) in enumerate(nodes.items())
        }  # fmt: skip
        self._state = State(jobs=jobs, started=True)
        self._config = Config(pools={}, schedule=[ScheduleSegment(mode=mode)])

    def ask(self, job: str, phase: str, step: int) -> None:
        """For all nodes of the phase's side."""
        nodes = self._state.jobs[job].nodes[phase]
        self._state.jobs[job].asked = step
        key = f"{phase} {step}"
        self._state.requests.append(LeaseRequest(key=key, job=job, client=job, phase=phase, step=step, nodes=nodes, asked_at=0.0))

    def granted(self) -> Iterator[str]:
        """Jobs whose requests are granted now; one after the other, since each may change what follows."""
        while found := queueing.grantable(self._state, self._config):
            request = found[0]
            self._state.requests.remove(request)
            self._state.token += 1
            self._state.leases[self._state.token] = Lease(
                token=self._state.token, key=request.key, job=request.job, client=request.client, phase=request.phase,
                step=request.step, nodes=list(request.nodes), granted_at=0.0,
            )  # fmt: skip
            yield request.job

    def give_back(self, job: str, nodes: Sequence[str] | None = None) -> None:
        """What the job holds, or only these nodes of it."""
        for lease in self._state.leases_of(job):
            left = [] if nodes is None else [node for node in lease.nodes if node not in nodes]
            if left:
                self._state.leases[lease.token] = msgspec.structs.replace(lease, nodes=left)
            else:
                del self._state.leases[lease.token]

    def ended(self, job: str, step: int) -> None:
        """A step is over."""
        self._state.jobs[job].reported = step

    def gangs(self, job: str) -> list[list[str]]:
        """Sets of nodes that it holds; if all of one came back, another job would begin."""
        return queueing.gangs(queueing.standing(self._state, self._config), self._state).get(job, [])


# Where no job waits for leases, engines slow each other, which no model here says.
ORDERLY: tuple[Mode, ...] = ("interleaved", "sequential")


@dataclass(frozen=True)
class Share:
    """What one job took. rollout, train: nodes. replicas: of each rollout node, by number; empty where the log does not say.

    before_s, after_s: seconds of a rollout's lease before its first request and after its last. between_s: of a step without a
    lease, waits for one aside. steps: in the time in which the jobs took turns.
    """

    rollout: tuple[str, ...]
    train: tuple[str, ...]
    replicas: dict[str, tuple[int, ...]]
    before_s: float
    after_s: float
    between_s: float
    steps: int

    @property
    def can_shrink(self) -> bool:
        """May a part of its rollout nodes go back before the others?"""
        return len(self.replicas) > 1 and set(self.replicas) == set(self.rollout)


@dataclass(frozen=True)
class Sharing:
    """Jobs that share nodes. mode: of the coordinator's schedule. recorded_s: seconds in which they took turns."""

    shares: dict[str, Share]
    mode: Mode
    recorded_s: float


def sharings(analysis: Analysis, recordings: Mapping[str, Recording]) -> list[Sharing]:
    """Of these jobs, those that took turns on nodes, in the last part of the run in which several did."""
    leases = analysis.leases
    for segment in reversed(leases.segments):
        if together := _together(leases, segment, set(recordings)):
            modes = [mode for mode in ORDERLY if mode == segment.mode]
            return [_sharing(analysis, recordings, segment, mode, jobs) for jobs in together for mode in modes]
    return []


def _together(leases: Leases, segment: Segment, known: set[str]) -> list[list[str]]:
    """Jobs joined by common nodes. One of which the log says too little would be missed by the others: none of those then."""
    holds = _work(leases, segment)
    jobs: list[set[str]] = []
    for node in {node for hold in holds for node in hold.nodes}:
        mine = {hold.job for hold in holds if node in hold.nodes}
        near = [its for its in jobs if its & mine]
        jobs = [its for its in jobs if not its & mine] + [mine.union(*near)]
    return sorted(sorted(its) for its in jobs if len(its) > 1 and its <= known)


def _work(leases: Leases, segment: Segment) -> list[Hold]:
    start, end = segment.window
    return [hold for hold in leases.holds if hold.phase in ("rollout", "train") and start <= hold.start < end]


def _sharing(
    analysis: Analysis, recordings: Mapping[str, Recording], segment: Segment, mode: Mode, jobs: Sequence[str]
) -> Sharing:  # fmt: skip
    holds = [hold for hold in _work(analysis.leases, segment) if hold.job in jobs]
    shares = {
        job: _share(recordings[job], [hold for hold in holds if hold.job == job], _replicas(analysis, recordings[job]))
        for job in jobs
    }
    recorded = max(hold.end for hold in holds) - min(hold.start for hold in holds)
    return Sharing(shares, mode, recorded)


def _replicas(analysis: Analysis, recording: Recording) -> dict[str, tuple[int, ...]]:
    """Numbers of those of each node, counted from 0 as a rerun's are; none where the log does not say of each where it is."""
    nodes = sorted((number, node) for (job, number), node in analysis.engines.node_of.items() if job == recording.job)
    out: dict[str, tuple[int, ...]] = {}
    for number, (_, node) in enumerate(nodes):
        out[node] = (*out.get(node, ()), number)
    return out if len(nodes) == recording.replicas else {}


def _share(recording: Recording, holds: Sequence[Hold], replicas: dict[str, tuple[int, ...]]) -> Share:
    rollout, train = ([hold for hold in holds if hold.phase == phase] for phase in ("rollout", "train"))
    before, after, between = [], [], []
    for step in recording.steps:
        around = [hold for hold in rollout if hold.start <= step.start < hold.end]
        trained = [hold.end - hold.start for hold in train if hold.step == step.step]
        if not around or not trained:
            continue
        before.append(step.start - min(hold.start for hold in around))
        after.append(max(max(hold.end for hold in around) - step.start - step.rollout_s, 0.0))
        between.append(max(step.rest_s - before[-1] - after[-1] - sum(trained), 0.0))
    return Share(
        _nodes(rollout), _nodes(train), replicas, _median(before), _median(after), _median(between),
        len({hold.step for hold in rollout}),
    )  # fmt: skip


def _nodes(holds: Sequence[Hold]) -> tuple[str, ...]:
    return tuple(sorted({node for hold in holds for node in hold.nodes}))


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds)) if seconds else 0.0


POLICY = MigrationPolicy()  # as a job migrates
LOOKS_S = 0.5  # between two looks of a rollout at the jobs that wait for its nodes
_PLENTY = 1 << 60  # tokens of KV cache


@dataclass(frozen=True)
class Makespan:
    """Of all jobs under `keys` (by job), in seconds; base_s: under the recorded ones. change: as a part; interval of it."""

    keys: dict[str, dict[str, str]]
    seconds: float
    base_s: float
    change: float
    interval: tuple[float, float]


class Together:
    """predict(keys of each job). models: of the jobs that share."""

    def __init__(self, sharing: Sharing, models: Mapping[str, WhatIf]) -> None:
        self.sharing, self.models = sharing, {job: models[job] for job in sharing.shares}
        sizes = {job: model.settings.wanted * model.settings.samples for job, model in self.models.items()}
        samples = sum(sharing.shares[job].steps * size for job, size in sizes.items())
        self.part = min(1.0, MAX_SAMPLES / max(samples, 1))  # of the steps: a long recording's are too many
        self._bases: dict[int | None, float] = {}

    def predict(self, keys: Mapping[str, Mapping[str, str]]) -> Makespan:
        """Under `keys` besides the recorded ones; a job without any runs as recorded.

        Raises:
            UserError: a key or value that cannot be tried.
        """
        settings = {job: changed(model.settings, keys.get(job, {})) for job, model in self.models.items()}
        seconds, base = self._run(settings, None), self._base(None)
        ratios = [self._run(settings, world) / self._base(world) for world in range(RESAMPLED)]
        drift = math.sqrt(sum(model.drift**2 for model in self.models.values()) / len(self.models))
        chosen = {job: dict(its) for job, its in keys.items()}
        return Makespan(chosen, seconds, base, seconds / base - 1, interval_of(seconds / base, ratios, drift))

    @property
    def base_s(self) -> float:
        """Seconds under the recorded keys."""
        return self._base(None)

    def _base(self, world: int | None) -> float:
        if world not in self._bases:
            self._bases[world] = self._run({job: model.settings for job, model in self.models.items()}, world)
        return self._bases[world]

    def _run(self, settings: Mapping[str, Settings], world: int | None) -> float:
        jobs = []
        for job, model in self.models.items():
            share = self.sharing.shares[job]
            jobs.append(_Job(job, settings[job], share, model, world, max(1, round(self.part * share.steps))))
        return _Run(jobs, self.sharing.mode).seconds()


class _Job:
    """One job's steps, and what each takes beside its rollout."""

    def __init__(self, name: str, settings: Settings, share: Share, model: WhatIf, world: int | None, steps: int) -> None:
        self.name, self.settings, self.share, self.steps = name, settings, share, steps
        self.rerun, self.training = model.rerun(settings, world), model.training(world)
        self.migrates = settings.rollout.migration and share.can_shrink

    def train_s(self, tokens: int) -> float:
        """Seconds of the training's lease."""
        return max(self.training.seconds(tokens) - self.share.before_s - self.share.after_s - self.share.between_s, 0.0)


class _Run:
    """seconds() until the last job is through."""

    def __init__(self, jobs: list[_Job], mode: Mode) -> None:
        self._now = 0.0
        self._jobs = jobs
        nodes = {job.name: {"rollout": job.share.rollout, "train": job.share.train} for job in jobs}
        self._queue = LeaseQueue(nodes, {job.name: job.steps for job in jobs}, mode)

    def seconds(self) -> float:
        """Each job goes on when what it waits for is there: a time, or a lease."""
        lives = {job.name: self._life(job) for job in self._jobs}
        until = {name: next(life) for name, life in lives.items()}
        while until:
            for name in self._queue.granted():
                until[name] = next(lives[name])
            name = min(until, key=lambda it: until[it])
            self._now = until[name]
            assert self._now < math.inf, "all jobs wait for leases and none holds one"
            if (then := next(lives[name], None)) is None:
                del until[name]
            else:
                until[name] = then
        return self._now

    def _life(self, job: _Job) -> Iterator[float]:
        """Yields until when it does nothing; infinity: until it has the lease that it asked for."""
        share = job.share
        for step in range(1, job.steps + 1):
            self._queue.ask(job.name, "rollout", step)
            yield math.inf
            yield self._now + share.before_s
            yield from self._rollout(job)
            yield self._now + share.after_s
            self._queue.give_back(job.name)
            self._queue.ask(job.name, "train", step)
            yield math.inf
            yield self._now + job.train_s(job.rerun.finish().tokens)
            self._queue.give_back(job.name)
            self._queue.ended(job.name, step)
            if step < job.steps:
                yield self._now + share.between_s

    def _rollout(self, job: _Job) -> Iterator[float]:
        rerun, tail = job.rerun, _Tail(job)
        rerun.begin(self._now)
        while not rerun.over:
            look = self._now + LOOKS_S if job.migrates else math.inf
            yield min(rerun.next_at(), look, tail.asleep_at)
            if self._now >= tail.asleep_at:
                self._queue.give_back(job.name, tail.asleep())
            if self._now >= rerun.next_at():
                rerun.advance()
            if job.migrates and not rerun.over:
                tail.consider(self._now, self._queue.gangs(job.name))


class _Tail:
    """The tail of one rollout: what `trainer/replica_moves.py` does in a job."""

    def __init__(self, job: _Job) -> None:
        self._job, self._freed = job, set[str]()
        self.asleep_at = math.inf

    def asleep(self) -> list[str]:
        """The nodes whose engines sleep by now, to be given back."""
        self.asleep_at = math.inf
        return sorted(self._freed)

    def consider(self, now: float, gangs: list[list[str]]) -> None:
        """Gathers it where that pays at this moment. gangs: as LeaseQueue has them."""
        rerun, policy = self._job.rerun, POLICY
        if not gangs or self.asleep_at < math.inf or not policy.threshold * rerun.launched <= rerun.done < rerun.launched:
            return
        names: dict[str, Key] = {}
        replicas = self._replicas(rerun, now, names)
        running = sum(len(replica.requests) for replica in replicas) / max(len(replicas), 1)
        speed = estimated_speed(rerun.speed.token_s(running), replicas)
        found = plan(replicas, rerun.done, rerun.launched, gangs, speed, policy)
        if isinstance(found, Migration):
            numbers = self._job.share.replicas
            turns = {node: itertools.cycle(its) for node, its in numbers.items()}
            moves = {names[move.request]: next(turns[move.target]) for move in found.moves}
            rerun.gather(now, [number for node in found.freed for number in numbers[node]], moves)
            self._freed |= set(found.freed)
            self.asleep_at = now + self._job.share.after_s

    def _replicas(self, rerun: Rerun, now: float, names: dict[str, Key]) -> list[Replica]:
        """Each node that is left as one replica of the plan. names: gets what each request is called there."""
        running, settings, out = rerun.running(now), self._job.settings, []
        for node, numbers in self._job.share.replicas.items():
            if node in self._freed:
                continue
            requests = []
            for key, (read, so_far) in ((key, it) for number in numbers for key, it in running[number].items()):
                name = f"{key[0]}_{key[1]}"
                names[name] = key
                requests.append(Request(name, read, expected_remaining(so_far, settings.longest)))
            out.append(Replica(node, (node,), tuple(requests), len(numbers) * settings.slots, _PLENTY))
        return out
