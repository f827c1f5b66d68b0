"""Which max_response_length a run's own responses argue for.

For each candidate: what of the time was spent on tokens beyond it, and what of the reward came from responses longer than
it, which the candidate would have truncated. Shortening is advised only where the reward at stake is next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_QUANTILES = (0.5, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
_ROUND_TO = 64


@dataclass(frozen=True, slots=True)
class LengthSample:
    """One response: tokens, reward, seconds of generation, and the step it belongs to."""

    length: int
    reward: float
    seconds: float
    step: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """Shares in [0, 1] of what lies beyond `max_response_length` tokens.

    responses: longer ones. time: seconds of all responses spent beyond it. step_time: how much sooner the steps' slowest
    responses would have ended, a step lasting as long as its slowest. reward: of the reward above the worst one given.
    """

    max_response_length: int
    responses: float
    time: float
    step_time: float
    reward: float


@dataclass(frozen=True, slots=True)
class Advice:
    """recommended: tokens, or None to leave the limit. reason: one sentence."""

    candidates: tuple[Candidate, ...]
    recommended: int | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def advise(
    samples: Sequence[LengthSample],
    candidates: Sequence[int] | None = None,
    *,
    max_reward_share: float = 0.01,
    min_time_share: float = 0.05,
) -> Advice:
    """The shortest candidate that puts at most `max_reward_share` of the reward at stake and saves `min_time_share`.

    Without candidates, rounded quantiles of the lengths are tried.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("length advice needs at least one response")
    length, reward, seconds, step = (np.array([getattr(s, n) for s in samples]) for n in ("length", "reward", "seconds", "step"))
    chosen = sorted(set(candidates or _quantiles(length)))
    table = tuple(_candidate(limit, length, reward, seconds, step) for limit in chosen)
    for row in table:
        if row.reward <= max_reward_share and row.step_time >= min_time_share:
            return Advice(table, row.max_response_length, _why(row))
    return Advice(table, None, "no shorter limit saves enough time at next to no reward")


def _quantiles(length: np.ndarray) -> list[int]:
    return [int(np.ceil(value / _ROUND_TO)) * _ROUND_TO or _ROUND_TO for value in np.quantile(length, _QUANTILES)]


def _candidate(limit: int, length: np.ndarray, reward: np.ndarray, seconds: np.ndarray, step: np.ndarray) -> Candidate:
    longer = length > limit
    # Time is taken as even over a response's tokens; prompts and tool calls are a small part of the long ones.
    within = seconds * np.minimum(1.0, limit / np.maximum(length, 1))
    steps = np.unique(step, return_inverse=True)[1]
    slowest, slowest_within = np.zeros(steps.max() + 1), np.zeros(steps.max() + 1)
    np.maximum.at(slowest, steps, seconds)
    np.maximum.at(slowest_within, steps, within)
    earned = reward - reward.min()
    return Candidate(
        max_response_length=limit,
        responses=float(longer.mean()),
        time=_share(seconds.sum() - within.sum(), seconds.sum()),
        step_time=_share(slowest.sum() - slowest_within.sum(), slowest.sum()),
        reward=_share(earned[longer].sum(), earned.sum()),
    )


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else 0.0


def _why(row: Candidate) -> str:
    return (
        f"{row.max_response_length} tokens would end the steps {row.step_time:.0%} sooner; {row.responses:.1%} of the "
        f"responses are longer and earn {row.reward:.1%} of the reward"
    )
