"""What a recorded job would have taken under other keys: the recording run again with and without them, side by side.

A change is the ratio of the two runs, times what was measured: what the model of the engine leaves out is then in both.
The interval (5 to 95 %) has two parts. What the recording leaves open: the change over resampled steps (of their prompts, of the
stays that the engine's speed is fitted to, of the times of training), about the change predicted. And what two runs of one
machine differ by whatever their keys: how far the quarters of the recording lie apart, each quarter's rollouts over what the
model says of the same prompts; of two runs sqrt(2) times as much. Runs on the command line; called by advice.py; pure.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import polars as pl

from verl_mux.errors import UserError
from verl_mux.what_if import rerun
from verl_mux.what_if.recorded_run import Recording, Settings, StepTimes, changed, in_order, recorded, resampled
from verl_mux.what_if.rerun import Rerun, Speed, Step

LEAST_STEPS = 16
MAX_SAMPLES = 30_000  # of one run; a long recording's steps are as many as this allows
RESAMPLED = 12
WARM_PART = 0.25  # steps at the beginning, while what is left over builds up
LOW, HIGH = 0.05, 0.95
DEVIATIONS = 1.645  # of a normal distribution, at these
BLOCKS = 4


@dataclass(frozen=True)
class Outcome:
    """Means over steps. step_s, rollout_s: seconds. gpu_s: GPU-seconds of a step (see `_gpus`). lag: versions that a trained
    token's weights were behind. oldest: the same of each step's oldest token. reward: mean score of what was trained; None
    without scores. generated: tokens for each token trained."""

    step_s: float
    rollout_s: float
    gpu_s: float
    lag: float
    oldest: float
    reward: float | None
    generated: float


@dataclass(frozen=True)
class Prediction:
    """The recording under `keys`. change: of the step's seconds, as a part (-0.2: a fifth less); interval of it.
    reward_at_stake: part of the reward above the worst one given that the trained responses earn less."""

    keys: dict[str, str]
    outcome: Outcome
    base: Outcome
    change: float
    interval: tuple[float, float]
    gpu_change: float
    reward_at_stake: float | None


@dataclass(frozen=True)
class Training:
    """Seconds of a step beside its rollout: `fixed + token * tokens`, and the waits for leases."""

    fixed: float
    token: float
    leases: float

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.token * tokens


class WhatIf:
    """predict(keys) on one recording. stays: the job's, of `measures.analysis.Engines.stays`.

    Raises:
        UserError: the log does not tell how fast its engines were.
    """

    def __init__(self, recording: Recording, stays: pl.DataFrame) -> None:
        self.recording, self._stays = recording, stays
        self.settings = recorded(recording)
        scores = [s.score for group in recording.groups for s in group.samples if s.score is not None]
        self._worst = min(scores, default=0.0)
        self._gpus = _gpus(recording)
        speed = rerun.fit(stays)
        if speed is None:
            raise UserError(f"{recording.job or 'this log'} cannot be run again: too few stays in engines say how long they took")
        self._steps = self._count()
        self._speed = speed.times(math.exp(float(np.median(self._off(speed)))))
        self.drift = drift_of(self._off(self._speed))
        self._training = _training(recording.steps)
        self._worlds = [self._world(seed) for seed in range(RESAMPLED)]
        self._bases: dict[int | None, Outcome] = {}

    def _count(self) -> int:
        each = self.settings.wanted * self.settings.samples
        return max(4, min(max(LEAST_STEPS, len(self.recording.steps)), MAX_SAMPLES // max(each, 1)))

    def _off(self, speed: Speed) -> np.ndarray:
        """Logarithm of how much longer each rollout was than the model says of the recorded steps, with their own prompts."""
        groups = [
            group for group in self.recording.groups if len(group.samples) == self.settings.samples
        ] or self.recording.groups
        # Recorded in the order of its tail rounds.
        as_it_came = replace(self.settings, rollout=msgspec.structs.replace(self.settings.rollout, tail="none"))
        rerun = Rerun(as_it_came, self.recording, itertools.chain(groups, resampled(self.recording, 0)), speed, self._worst)
        known = self.recording.steps[: self._steps]
        said = np.array([rerun.step().rollout_s for _ in known])
        return np.log([max(step.rollout_s, 1e-9) for step in known]) - np.log(np.maximum(said, 1e-9))

    def _world(self, seed: int) -> tuple[Speed, Training, int]:
        """One that the recording does not exclude."""
        chance = random.Random(seed)
        stays = self._stays.sample(fraction=1.0, with_replacement=True, seed=seed)
        fitted = rerun.fit(stays)
        speed = self._speed if fitted is None else fitted.times(math.exp(float(np.median(self._off(fitted)))))
        return speed, _training(chance.choices(self.recording.steps, k=len(self.recording.steps))), seed + 1

    @property
    def base(self) -> Outcome:
        """Under the recorded keys."""
        return self._base(None)

    def predict(self, keys: Mapping[str, str]) -> Prediction:
        """Under `keys` besides the recorded ones.

        Raises:
            UserError: a key or value that cannot be tried.
        """
        settings = changed(self.settings, keys)
        outcome, base = self._run(settings, None), self._base(None)
        ratios = [self._run(settings, world).step_s / self._base(world).step_s for world in range(RESAMPLED)]
        change = outcome.step_s / base.step_s
        return Prediction(
            dict(keys), outcome, base, change - 1, interval_of(change, ratios, self.drift), outcome.gpu_s / base.gpu_s - 1,
            self._at_stake(outcome, base),
        )  # fmt: skip

    def _base(self, world: int | None) -> Outcome:
        if world not in self._bases:
            self._bases[world] = self._run(self.settings, world)
        return self._bases[world]

    def _at_stake(self, outcome: Outcome, base: Outcome) -> float | None:
        if outcome.reward is None or base.reward is None or base.reward <= self._worst:
            return None
        return (base.reward - outcome.reward) / (base.reward - self._worst)

    def _run(self, settings: Settings, world: int | None) -> Outcome:
        rerun = self.rerun(settings, world)
        warm = max(1, round(WARM_PART * self._steps))
        steps = [rerun.step() for _ in range(self._steps + warm)][warm:]
        return self._outcome(steps, self.training(world))

    def rerun(self, settings: Settings, world: int | None) -> Rerun:
        """Of the recording; of one of RESAMPLED others that it does not exclude, by number."""
        if world is None:
            return Rerun(settings, self.recording, in_order(self.recording, 0), self._speed, self._worst)
        speed, _, seed = self._worlds[world]
        return Rerun(settings, self.recording, resampled(self.recording, seed), speed, self._worst, seed)

    def training(self, world: int | None) -> Training:
        """Likewise."""
        return self._training if world is None else self._worlds[world][1]

    def _outcome(self, steps: Sequence[Step], training: Training) -> Outcome:
        rollout = float(np.mean([step.rollout_s for step in steps]))
        train = float(np.mean([training.seconds(step.tokens) for step in steps]))
        tokens = max(sum(step.tokens for step in steps), 1)
        scores = [score for step in steps for score in step.scores]
        return Outcome(
            step_s=rollout + train + training.leases, rollout_s=rollout, gpu_s=self._gpus[0] * rollout + self._gpus[1] * train,
            lag=sum(step.behind for step in steps) / tokens, oldest=float(np.mean([step.oldest for step in steps])),
            reward=float(np.mean(scores)) if scores else None, generated=sum(step.generated for step in steps) / tokens,
        )  # fmt: skip


def drift_of(off: np.ndarray) -> float:
    """Standard deviation of the means of the recording's quarters; 0 where they would be of one step."""
    if len(off) < 2 * BLOCKS:
        return 0.0
    return float(np.std([block.mean() for block in np.array_split(off, BLOCKS)], ddof=1))


def interval_of(ratio: float, ratios: Sequence[float], drift: float) -> tuple[float, float]:
    """Of the change, by logarithms: resampling's own quantiles about `ratio`, and with them in quadrature two runs' drift."""
    logs = np.log(ratios)
    middle = float(np.median(logs))
    between = DEVIATIONS * math.sqrt(2) * drift
    below, above = (math.hypot(float(np.quantile(logs, q)) - middle, between) for q in (LOW, HIGH))
    return ratio * math.exp(-below) - 1, ratio * math.exp(above) - 1


def _gpus(recording: Recording) -> tuple[int, int]:
    """GPUs of the rollout and of training; one a replica and one where the log does not say."""
    keys = recording.keys
    rollout = int(keys.get("actor_rollout_ref.rollout.nnodes", 0)) * int(keys.get("actor_rollout_ref.rollout.n_gpus_per_node", 1))
    train = int(keys.get("trainer.nnodes", 1)) * int(keys.get("trainer.n_gpus_per_node", 1))
    return rollout or (train if keys else recording.replicas), train


def _training(steps: Sequence[StepTimes]) -> Training:
    """The median of slopes between steps (Theil 1950, Sen 1968), which no odd step moves; never falling in tokens, and from
    tokens that differ by a tenth or more."""
    rest, tokens = np.array([s.rest_s for s in steps]), np.array([s.tokens for s in steps], dtype=float)
    leases = float(np.median([step.leases_s for step in steps]))
    apart = tokens[:, None] - tokens[None, :]
    far = apart > 0.1 * max(float(np.median(tokens)), 1.0)
    slope = float(np.median((rest[:, None] - rest[None, :])[far] / apart[far])) if far.any() else 0.0
    slope = min(max(slope, 0.0), float(np.median(rest)) / max(float(np.median(tokens)), 1.0))
    return Training(max(float(np.median(rest - slope * tokens)), 0.0), slope, leases)
