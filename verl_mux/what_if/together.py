"""Recorded jobs that shared nodes, run again on one clock: each by its Rerun, their leases by the coordinator's own queue, and
the tails of those that migrate by the product's own planner.

A job's step: rollout lease -> engines filled -> rollout -> engines asleep -> training lease -> what lies between two steps. All
ask for their first lease at once. Foretold is the makespan, until the end of the last training; validations are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verl_mux.coordinator.core.settings import Mode
from verl_mux.rollout.control.migration_plan import (
    Migration,
    Replica,
    Request,
    estimated_speed,
    expected_remaining,
    plan,
)
from verl_mux.what_if.lease_queue import LeaseQueue
from verl_mux.what_if.rerun import Key, Rerun
from verl_mux.what_if.settings import Settings, changed
from verl_mux.what_if.sharing import Share, Sharing
from verl_mux.what_if.what_if import MAX_SAMPLES, RESAMPLED, WhatIf, interval_of

LOOKS_S = 0.5  # between two looks of a rollout at who waits for its nodes
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
        samples = sum(self.sharing.shares[job].steps * _samples(model.settings) for job, model in self.models.items())
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
        told = {job: dict(its) for job, its in keys.items()}
        return Makespan(told, seconds, base, seconds / base - 1, interval_of(seconds / base, ratios, drift))

    @property
    def base_s(self) -> float:
        """Seconds under the recorded keys."""
        return self._base(None)

    def _base(self, world: int | None) -> float:
        if world not in self._bases:
            self._bases[world] = self._run({job: model.settings for job, model in self.models.items()}, world)
        return self._bases[world]

    def _run(self, settings: Mapping[str, Settings], world: int | None) -> float:
        jobs = [
            _Job(
                job,
                settings[job],
                self.sharing.shares[job],
                model,
                world,
                max(1, round(self.part * self.sharing.shares[job].steps)),
            )
            for job, model in self.models.items()
        ]
        return _Run(jobs, self.sharing.mode).seconds()


def _samples(settings: Settings) -> int:
    return settings.wanted * settings.samples


class _Job:
    """One job's steps, and what each takes beside its rollout."""

    def __init__(self, name: str, settings: Settings, share: Share, model: WhatIf, world: int | None, steps: int) -> None:
        self.name, self.settings, self.share, self.steps = name, settings, share, steps
        self.rerun, self.training = model.rerun(settings, world), model.training(world)
        self.migrates = settings.migration.enable and share.can_shrink

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
            assert self._now < math.inf, "all wait for leases and nobody holds one"
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
    """The tail of one rollout: what `rollout/control/tail_migration.py` does in a job."""

    def __init__(self, job: _Job) -> None:
        self._job, self._freed = job, set[str]()
        self.asleep_at = math.inf

    def asleep(self) -> list[str]:
        """The nodes whose engines sleep by now, to be given back."""
        self.asleep_at = math.inf
        return sorted(self._freed)

    def consider(self, now: float, gangs: list[list[str]]) -> None:
        """Gathers it where that pays at this moment. gangs: as LeaseQueue has them."""
        rerun, policy = self._job.rerun, self._job.settings.migration
        if not gangs or self.asleep_at < math.inf or not policy.threshold * rerun.launched <= rerun.done < rerun.launched:
            return
        names: dict[str, Key] = {}
        replicas = self._replicas(rerun, now, names)
        running = sum(len(replica.requests) for replica in replicas) / max(len(replicas), 1)
        speed = estimated_speed(rerun.token_s(running), replicas)
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
