"""How well scores order lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def kendall_tau(scores: np.ndarray, lengths: np.ndarray) -> float:
    """Kendall's tau-b of two (n,) arrays, in [-1, 1]. 0 where one of them is constant: such an order says nothing."""
    from scipy.stats import kendalltau

    if len(scores) < 2 or np.ptp(scores) == 0 or np.ptp(lengths) == 0:
        return 0.0
    return float(kendalltau(scores, lengths).statistic)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    error: float

    @property
    def z(self) -> float:
        """How many standard errors the mean lies from 0."""
        return self.mean / max(self.error, 1e-12)


def agreement(concordance: np.ndarray) -> Estimate:
    """Tau (ties count as neither) with its standard error over items, from `concordance`'s (n,) array."""
    return Estimate(float(concordance.mean()), float(2 * concordance.std() / np.sqrt(len(concordance))))


def concordance(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """For each item, (pairs ordered alike - pairs ordered otherwise) / pairs it is in: (n,). Time and memory go with n^2."""
    alike = _order(scores) * _order(lengths)
    return alike.sum(axis=1, dtype=np.int64) / max(1, len(scores) - 1)


def _order(values: np.ndarray) -> np.ndarray:
    """(n, n) int8: 1 where the row's value is the larger."""
    return (values[:, None] > values[None, :]).astype(np.int8) - (values[:, None] < values[None, :])
