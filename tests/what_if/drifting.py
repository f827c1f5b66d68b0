"""Runs of one job on a machine whose speed drifts, made without what-if's engines: one with the recorded keys, one with others.

A step's responses begin together; a token takes a hundredth of a second, whatever else runs, times the machine's pace then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from verl_mux.what_if.recorded_run import Group, Recording, Sample, StepTimes
from verl_mux.what_if.what_if import WhatIf

STEPS, REQUESTS, TOKEN_S, TRAIN_S = 16, 8, 0.01, 2.0
LIMIT = 150


@dataclass(frozen=True)
class Machine:
    """Pace of its steps: the logarithm is an autoregressive process of standard deviation `spread` that forgets in `memory`
    steps."""

    spread: float
    memory: float

    def paces(self, rng: np.random.Generator) -> np.ndarray:
        """(STEPS,) of one run."""
        keeps = np.exp(-1 / self.memory)
        shocks = rng.normal(0, self.spread, STEPS) * np.sqrt(1 - keeps**2)
        at, out = rng.normal(0, self.spread), []
        for shock in shocks:
            at = keeps * at + shock
            out.append(at)
        return np.exp(out)


def lengths(rng: np.random.Generator) -> np.ndarray:
    """(STEPS, REQUESTS) tokens."""
    return np.clip(rng.lognormal(4.5, 0.6, (STEPS, REQUESTS)), 10, 600).astype(int)


def step_s(tokens: np.ndarray, paces: np.ndarray, longest: int) -> float:
    """Mean seconds of a step of a run under this limit."""
    return float(np.mean(np.minimum(tokens, longest).max(axis=1) * TOKEN_S * paces) + TRAIN_S)


def recording(tokens: np.ndarray, paces: np.ndarray) -> tuple[Recording, pl.DataFrame]:
    """Of one run: what its log tells, and its stays."""
    groups, steps, stays, at = [], [], [], 0.0
    for number, (its, pace) in enumerate(zip(tokens.tolist(), paces.tolist(), strict=True), 1):
        groups += [Group(f"{number}-{place}", number, (Sample(length, 0, 0.0, None),)) for place, length in enumerate(its)]
        stays += [
            {"replica": 0, "start": at, "end": at + length * TOKEN_S * pace, "tokens": length, "work": length * TOKEN_S * pace}
            for length in its
        ]
        rollout = max(its) * TOKEN_S * pace
        steps.append(StepTimes(number, rollout, TRAIN_S, 0.0, sum(its)))
        at += rollout + TRAIN_S
    unsaid = {"decode": None, "prefill": 0.0, "prompt": 0.0, "cached": 0.0, "held": 0.0, "queue": 0.0}
    frame = pl.DataFrame(stays).with_columns(
        pl.lit(False).alias("cut"), *(pl.lit(value).cast(pl.Float64).alias(name) for name, value in unsaid.items())
    )
    keys = {"data.train_batch_size": str(REQUESTS)}
    return Recording("a", keys, tuple(groups), tuple(steps), replicas=1, slots=None, unknown=0), frame


def held(machine: Machine, seed: int) -> bool:
    """Lies the change of a step's time that a second run had, under LIMIT and on other prompts, in what the first foretells?"""
    rng = np.random.default_rng(seed)
    tokens, paces = lengths(rng), machine.paces(rng)
    low, high = WhatIf(*recording(tokens, paces)).predict({"data.max_response_length": str(LIMIT)}).interval
    true = step_s(lengths(rng), machine.paces(rng), LIMIT) / step_s(tokens, paces, int(tokens.max())) - 1
    return low <= true <= high
