"""Ridge regression from prompt text to a target, with its leave-one-out predictions.

The columns are the commonest words and word pairs (present or not, rows of unit length: weighing rare words up, as TF-IDF
does, hides the common instruction words that set a length) and the numbers of prompt_features, bent at their quantiles.
One eigendecomposition gives the leave-one-out error for every penalty, so the penalty and the weight between words and
numbers are chosen by that error and nothing is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_mux.rollout.lengths.prompt_features import BUCKETS, PromptFeatures

_MAX_COLUMNS = 1024
_MIN_PROMPTS_WITH_WORD = 3
_PENALTIES = np.geomspace(1e-2, 1e3, 16)
_NUMBER_WEIGHTS = (0.0, 0.1, 0.5)


@dataclass(frozen=True, slots=True)
class Columns:
    """Which features became columns. lookup: (BUCKETS,) int32, -1 where a bucket is no column, `num_words` of them are.

    centre, scale: (numbers,). knots: (numbers, knots) where a standardised number's line may bend.
    """

    lookup: np.ndarray
    num_words: int
    centre: np.ndarray
    scale: np.ndarray
    knots: np.ndarray

    @classmethod
    def choose(cls, features: Sequence[PromptFeatures]) -> Columns:
        """The columns for these prompts."""
        frequency = np.bincount(np.concatenate([f.words for f in features]), minlength=BUCKETS)
        usable = np.flatnonzero((frequency >= _MIN_PROMPTS_WITH_WORD) & (frequency <= 0.95 * len(features)))
        chosen = np.sort(usable[np.argsort(-frequency[usable], kind="stable")[:_MAX_COLUMNS]])
        lookup = np.full(BUCKETS, -1, dtype=np.int32)
        lookup[chosen] = np.arange(len(chosen))
        numbers = np.stack([f.numbers for f in features])
        centre, scale = numbers.mean(0), numbers.std(0)
        scale[scale < 1e-6] = np.inf  # says nothing: stays a column of zeros
        knots = np.quantile((numbers - centre) / scale, [0.25, 0.5, 0.75], axis=0).T.astype(np.float32)
        return cls(lookup, len(chosen), centre, scale, knots)

    def words(self, features: Sequence[PromptFeatures]) -> np.ndarray:
        """Rows of unit length, or zero where no word is known: (prompts, num_words) float32."""
        out = np.zeros((len(features), self.num_words), dtype=np.float32)
        columns = self.lookup[np.concatenate([f.words for f in features])]
        rows = np.repeat(np.arange(len(features)), [len(f.words) for f in features])
        known = columns >= 0
        out[rows[known], columns[known]] = 1
        return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-6)

    def numbers(self, features: Sequence[PromptFeatures]) -> np.ndarray:
        """Standardised numbers and their bends: (prompts, numbers * 4) float32. Beyond 3 deviations they stay level."""
        plain = np.clip((np.stack([f.numbers for f in features]) - self.centre) / self.scale, -3, 3).astype(np.float32)
        bent = np.maximum(plain[:, :, None] - self.knots[None], 0).reshape(len(plain), -1)
        return np.concatenate([plain, bent], axis=1)


@dataclass(frozen=True, slots=True)
class TextRidge:
    """A fitted regression. left_out: each training prompt's prediction without that prompt, (prompts,)."""

    columns: Columns
    mean: np.ndarray
    number_weight: float
    coefficients: np.ndarray
    intercept: float
    left_out: np.ndarray

    @classmethod
    def fit(cls, features: Sequence[PromptFeatures], target: np.ndarray, weight: np.ndarray) -> TextRidge:
        """target, weight: (prompts,). A weight is how much its target's precision counts, the largest being 1."""
        columns = Columns.choose(features)
        words, numbers = columns.words(features), columns.numbers(features)
        best: TextRidge | None = None
        lowest = np.inf
        for number_weight in _NUMBER_WEIGHTS:
            design = np.concatenate([words, number_weight * numbers], axis=1).astype(np.float64)
            mean = np.average(design, axis=0, weights=weight)
            intercept = float(np.average(target, weights=weight))
            root = np.sqrt(weight)
            error, coefficients, left_out = _ridge((design - mean) * root[:, None], (target - intercept) * root, root)
            if error < lowest:
                lowest = error
                best = cls(columns, mean, number_weight, coefficients, intercept, left_out + intercept)
        assert best is not None
        return best

    def predict(self, features: Sequence[PromptFeatures]) -> np.ndarray:
        """(prompts,) float64."""
        design = np.concatenate([self.columns.words(features), self.number_weight * self.columns.numbers(features)], axis=1)
        return (design - self.mean) @ self.coefficients + self.intercept


def _ridge(design: np.ndarray, target: np.ndarray, root: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Lowest leave-one-out error, its coefficients (columns,), and the left-out predictions (rows,) in target units."""
    left, singular = _singular(design)
    rotated = left.T @ target
    best = (np.inf, 0.0, target)
    for penalty in _PENALTIES:
        shrink = singular**2 / (singular**2 + penalty)
        leverage = np.minimum((left**2) @ shrink + root**2 / np.sum(root**2), 0.999)
        residual = (target - left @ (shrink * rotated)) / (1 - leverage)
        error = float(np.sum(residual**2))
        if error < best[0]:
            best = (error, penalty, residual)
    error, penalty, residual = best
    coefficients = design.T @ (left @ (rotated / (singular**2 + penalty)))
    return error, coefficients, (target - residual) / root


def _singular(design: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Left singular vectors (rows, rank) and singular values (rank,), from the smaller Gram matrix."""
    if design.shape[0] <= design.shape[1]:
        values, left = np.linalg.eigh(design @ design.T)
        keep = values > 1e-8 * values[-1]
        return left[:, keep], np.sqrt(values[keep])
    values, right = np.linalg.eigh(design.T @ design)
    keep = values > 1e-8 * values[-1]
    singular = np.sqrt(values[keep])
    return (design @ right[:, keep]) / singular, singular
