"""What a finding is, and the statistics that tell a fault from chance: isolated values.

Durations have heavy tails in healthy runs (lengths have), so a fixed number of deviations would raise false alarms. A value is
isolated when two models of the healthy tail agree that a sample of this size would not hold it:
- a lognormal expects fewer than LOGNORMAL. Beyond the 98th percentile it continues with the slope from the 90th to the 98th, and
  no steeper than LEAST_OF_WHOLE of the whole sample's spread (more in small samples): waits in a queue spread widely and yet
  have an end, lengths have none;
- a power law expects fewer than POWER_LAW. Its index comes from the large values just below the suspects, by Renyi's
  spacings, which are not biased by leaving the top out.
Runs in the report; called by the other modules of findings/; pure.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl


@dataclass(frozen=True)
class Finding:
    """One thing that cost time.

    kind: one of summary.DETECTORS. step, replica, node, worker: where (the worst place, if several); None where it has no
    such place, or the log does not say. seconds: how long the thing itself took, there. cost_s: seconds it cost all in all, by
    which findings are ranked. turn: 1 is the first.
    """

    kind: str
    job: str
    step: int | None
    worker: int | None
    seconds: float
    text: str
    advice: str
    request_id: str | None = None
    turn: int | None = None
    cost_s: float = 0.0
    start: float | None = None
    end: float | None = None
    replica: int | None = None
    node: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": round(self.seconds, 6), "cost_s": round(self.cost_s or self.seconds, 6)}


def over_steps(found: list[Finding]) -> Finding:
    """The findings of one place in several steps, as one: its worst step, and what they cost together."""
    worst = max(found, key=lambda finding: finding.seconds)
    steps = sorted({finding.step for finding in found if finding.step is not None})
    return replace(worst, cost_s=sum(f.seconds for f in found), evidence=worst.evidence | {"steps": steps})


NAME = {"job": pl.String, "step": pl.Int64, "request_id": pl.String}


def named(findings: list[Finding]) -> pl.DataFrame:
    """NAME of the requests that findings name."""
    rows = {(f.job, f.step, name) for f in findings for name in f.evidence.get("request_ids", [f.request_id])}
    return pl.DataFrame(list(rows), NAME, orient="row")


LOGNORMAL = 1e-5
POWER_LAW = 0.05
MIN_RATIO = 3.0  # less than three times the expected is not worth a person's time
MIN_SAMPLE = 8
FEW_VALUES = 16
MIN_RATIO_OF_FEW = 10.0
SUSPECTS = 0.02  # more than this part of a sample is no outlier but a second mode
TAIL = 0.10
MIN_SPREAD = 0.05
LEAST_OF_WHOLE = 0.5
SECOND_MODE = 2.0  # times as wide as the rest: a tail that is no lognormal's
Z90, Z98 = 1.2816, 2.0537  # the normal distribution's quantiles


def isolated(ratios: np.ndarray) -> np.ndarray:
    """Indices of isolated values, largest first. `ratios`: positive, each value over what was expected of it."""
    count = len(ratios)
    if count < MIN_SAMPLE:
        return np.array([], dtype=int)
    order = np.argsort(ratios)[::-1]
    suspects = max(2, math.ceil(SUSPECTS * count))
    logs = np.log(np.maximum(ratios, 1e-12))[order]
    least = MIN_RATIO if count >= FEW_VALUES else MIN_RATIO_OF_FEW
    large = ratios[order[:suspects]] >= least * max(1.0, float(np.median(ratios)))
    rare = (_lognormal_count(logs, suspects) < LOGNORMAL) & (_power_law_count(logs, suspects) < POWER_LAW)
    return order[:suspects][rare & large]


def _lognormal_count(logs: np.ndarray, suspects: int) -> np.ndarray:
    """How many values as large as each suspect the sample should hold. `logs` falls."""
    body = logs[suspects:]
    middle, high, higher = np.quantile(body, [0.5, 0.9, 0.98])
    unsure = 1 / math.sqrt(len(logs))
    whole = max((high - middle) / Z90, (higher - middle) / Z98, MIN_SPREAD)
    spread = max((higher - high) / (Z98 - Z90), min(LEAST_OF_WHOLE + 3 * unsure, 1.0) * whole, MIN_SPREAD)
    spread *= 1 + 2 * unsure  # and the top was left out
    deviations = Z98 + (logs[:suspects] - higher) / spread
    return np.array([len(logs) * math.erfc(z / math.sqrt(2)) / 2 for z in deviations])


def _power_law_count(logs: np.ndarray, suspects: int) -> np.ndarray:
    tail = logs[suspects : suspects + max(5, int(TAIL * len(logs))) + 1]
    ranks = np.arange(suspects + 1, suspects + len(tail))
    index = max(float(np.mean(ranks * (tail[:-1] - tail[1:]))), MIN_SPREAD)
    return (suspects + 1) * np.exp(-np.maximum(logs[:suspects] - tail[0], 0.0) / index)


def chance(values: np.ndarray, others: np.ndarray) -> float:
    """A bound on the chance that values drawn from the lognormal of `others` are as large as these: the least over k of that for
    the k largest. 0 where `others` are too few to tell. All positive.
    """
    if len(others) < MIN_SAMPLE:
        return 0.0
    middle, high, higher = np.quantile(np.log(others), [0.5, 0.9, 0.98])
    spread = max((high - middle) / Z90, MIN_SPREAD)
    if (higher - middle) / Z98 <= SECOND_MODE * spread:  # else the largest of the others are of another kind themselves
        spread = max(spread, (higher - middle) / Z98)
    least = 1.0
    for k, value in enumerate(np.sort(np.log(values))[::-1], 1):
        expected = len(values) * math.erfc((value - middle) / spread / math.sqrt(2)) / 2
        least = min(least, expected**k / math.factorial(k)) if k <= MIN_SAMPLE else least
    return least


def expected_seconds(seconds: np.ndarray, tokens: np.ndarray | None) -> np.ndarray:
    """What each value should be: a line in its tokens where they are known (fitted by halves' medians), else the median."""
    middle = float(np.median(seconds))
    if tokens is None:
        return np.full(len(seconds), middle)
    long = tokens > np.median(tokens)
    if long.sum() < 4 or (~long).sum() < 4:
        return np.full(len(seconds), middle)
    rise = np.median(seconds[long]) - np.median(seconds[~long])
    slope = max(rise / max(np.median(tokens[long]) - np.median(tokens[~long]), 1.0), 0.0)
    base = max(float(np.median(seconds - slope * tokens)), 0.0)
    return np.maximum(base + slope * tokens, 0.1 * middle)


Place = tuple[str, int, int]  # job, step, worker or replica


@dataclass(frozen=True)
class Gap:
    """Between completion number `before` (counted from 1) and the `after` that follow. Seconds; `start` and `end` as the input's
    clock; completions a second on both sides."""

    start: float
    end: float
    before: int
    after: int
    pace_before: float = 0.0
    pace_after: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start
