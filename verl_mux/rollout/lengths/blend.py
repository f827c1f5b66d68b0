"""A prompt's own history blended with what its text says, the weights estimated from the same history.

The model, on the log of lengths: length = epoch + g(text) + prompt + noise. g is a ridge regression; the variances of
`prompt` and `noise` come from how much one prompt's cells differ; a prompt's score is the posterior mean
g + k * (its mean - g), where k grows with its cells. Whatever is uncertain falls back on the plain running mean:

- text that orders prompts no better than chance (left out one by one) is ignored;
- recent epochs count for more only where that would have ordered the last epochs better;
- the blend is used only if it would have ordered the last epochs better than the running mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verl_mux.rollout.lengths.past_lengths import LengthHistory
from verl_mux.rollout.lengths.prompt_features import PromptFeatures
from verl_mux.rollout.lengths.rank_agreement import Estimate, agreement, concordance
from verl_mux.rollout.lengths.text_ridge import TextRidge

_SAMPLE = 1500  # prompts in a pairwise comparison: 2 million pairs, some 30 ms
_MIN_PROMPTS = 64  # below it every comparison is chance
_MIN_TEXT_TAU, _MIN_TEXT_Z = 0.08, 4.0
_DECAYS = (1.0, 0.6)
# One epoch of single samples does not tell noise from difference between prompts. Taking this share for noise gains where
# more is noise, as with sampled responses, and loses only where less than half of it is, as with greedy ones.
_PRIOR_NOISE_SHARE = 0.2
_PRIOR_FREEDOM = 20
_BACKTESTS = 3


@dataclass(frozen=True, slots=True)
class Blend:
    """What one fit found. effects: of each epoch on log length, relative to the last. signal, noise: variances.

    text_by_row: g for each row of the history at the time of the fit, left out where it was trained on; NaN where unknown.
    trusted: whether the blend may replace the running mean.
    """

    effects: dict[int, float]
    decay: float
    centre: float
    ridge: TextRidge | None
    text_by_row: np.ndarray
    signal: float
    noise: float
    trusted: bool

    def posterior(self, cells: np.ndarray, text: np.ndarray) -> np.ndarray:
        """Expected log length of prompts with these cells (prompts, epochs), effects taken off, NaN where none."""
        mean, count = _recent_mean(cells, self.decay)
        share = count * self.signal / (count * self.signal + self.noise)
        return np.where(count > 0, text + share * (np.nan_to_num(mean) - text), text)

    def adjusted(self, history: LengthHistory, rows: np.ndarray) -> np.ndarray:
        """Cells of these rows, (rows, epochs), without the epochs' effects."""
        return history.log_mean[rows] - np.array([self.effects.get(epoch, 0.0) for epoch in history.epochs])


def fit(history: LengthHistory, rows: np.ndarray, features: Sequence[PromptFeatures]) -> Blend:
    """Fit on these rows of the history and their prompts' features, at least one of each."""
    logs = history.log_mean[rows]
    effects = _epoch_effects(logs)
    cells = logs - effects
    decay = _choose_decay(cells)
    mean, count = _recent_mean(cells, decay)
    centre = float(mean.mean())
    ridge = _fit_text(features, mean, count)
    text = ridge.left_out if ridge else np.full(len(rows), centre)
    signal, noise = _variances(cells - text[:, None], history)
    text_by_row = np.full(len(history), np.nan)
    text_by_row[rows] = text
    draft = Blend(dict(zip(history.epochs, effects, strict=True)), decay, centre, ridge, text_by_row, signal, noise, False)
    trusted = _would_have_helped(draft, cells, text, history.length_sum[rows], history.count[rows])
    return Blend(draft.effects, decay, centre, ridge, text_by_row, signal, noise, trusted)


def _recent_mean(cells: np.ndarray, decay: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each row's cells, an epoch counting `decay` times the next, and how many equal cells it is worth."""
    weight = ~np.isnan(cells) * decay ** np.arange(cells.shape[1])[::-1]
    total = weight.sum(axis=1)
    mean = np.divide((weight * np.nan_to_num(cells)).sum(axis=1), total, out=np.full(len(cells), np.nan), where=total > 0)
    return mean, total**2 / np.maximum((weight**2).sum(axis=1), 1e-12)


def _epoch_effects(logs: np.ndarray) -> np.ndarray:
    """How much longer each epoch was than the last for the same prompts: (epochs,). Alternating least squares."""
    effects = np.zeros(logs.shape[1])
    for _ in range(10):
        prompt = np.nanmean(logs - effects, axis=1, keepdims=True)
        effects = np.nanmean(logs - prompt, axis=0)
        effects -= effects[-1]
    return effects


def _fit_text(features: Sequence[PromptFeatures], mean: np.ndarray, count: np.ndarray) -> TextRidge | None:
    """The regression on text, or None where its left-out predictions order the prompts no better than chance would."""
    if len(features) < _MIN_PROMPTS:
        return None
    weight = count / (count + 1)
    ridge = TextRidge.fit(features, mean, weight / weight.max())
    sample = _sample(np.arange(len(mean)))
    tau = agreement(concordance(ridge.left_out[sample], mean[sample]))
    return ridge if tau.mean > _MIN_TEXT_TAU and tau.z > _MIN_TEXT_Z else None


def _variances(residual: np.ndarray, history: LengthHistory) -> tuple[float, float]:
    """(between prompts, between one prompt's cells) of the cells' residuals: (prompts, epochs), NaN where none."""
    total = float(np.nanmean(residual**2)) + 1e-9
    noise, freedom = _PRIOR_NOISE_SHARE * total, _PRIOR_FREEDOM
    sampled, sampled_freedom = history.sample_variance
    if sampled_freedom >= _PRIOR_FREEDOM:  # prompt groups show the noise within one epoch already
        noise = sampled / float(history.count[history.count > 0].mean())
    present = ~np.isnan(residual)
    repeated = present.sum(axis=1) >= 2
    if repeated.any():
        spread = residual[repeated] - np.nanmean(residual[repeated], axis=1, keepdims=True)
        seen = int(present[repeated].sum() - repeated.sum())
        noise = (float(np.nansum(spread**2)) + freedom * noise) / (seen + freedom)
    noise = min(noise, total)
    return max(total - noise, 0.02 * total), noise


def _choose_decay(cells: np.ndarray) -> float:
    """1, unless counting recent epochs for more would have ordered the last two epochs clearly better."""
    gains: list[Estimate] = []
    for past, target in _backtests(cells, 2):
        rows = _sample(np.flatnonzero(((~np.isnan(past)).sum(axis=1) >= 2) & ~np.isnan(target)))
        if len(rows) >= _MIN_PROMPTS:
            even, recent = (concordance(_recent_mean(past[rows], decay)[0], target[rows]) for decay in _DECAYS)
            gains.append(agreement(recent - even))
    return _DECAYS[1] if gains and _pooled(gains).z > 1 else _DECAYS[0]


def _would_have_helped(blend: Blend, cells: np.ndarray, text: np.ndarray, sums: np.ndarray, counts: np.ndarray) -> bool:
    """Whether the blend would have ordered the last epochs better than the running mean.

    With text there is reason to expect it, and a first epoch needs no evidence; without text it must be clear.
    """
    gains: list[Estimate] = []
    for past, target in _backtests(cells, _BACKTESTS):
        known = past.shape[1]
        rows = _sample(np.flatnonzero((~np.isnan(past)).any(axis=1) & ~np.isnan(target)))
        if len(rows) >= _MIN_PROMPTS:
            blended = concordance(blend.posterior(past[rows], text[rows]), target[rows])
            running = sums[rows, :known].sum(axis=1) / counts[rows, :known].sum(axis=1)
            gains.append(agreement(blended - concordance(running, target[rows])))
    if blend.ridge is not None:
        return not gains or _pooled(gains).mean > 0.002
    return bool(gains) and _pooled(gains).mean > 0.005 and _pooled(gains).z > 2


def _backtests(cells: np.ndarray, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(earlier cells, that epoch's cells) for up to `most` epochs, the latest first."""
    for epoch in range(cells.shape[1] - 1, max(0, cells.shape[1] - 1 - most), -1):
        yield cells[:, :epoch], cells[:, epoch]


def _pooled(latest_first: Sequence[Estimate]) -> Estimate:
    """Mean of the estimates, each counting half of the one after it in time."""
    weight = 0.5 ** np.arange(len(latest_first))
    weight /= weight.sum()
    mean = float(sum(w * e.mean for w, e in zip(weight, latest_first, strict=True)))
    error = float(np.sqrt(sum((w * e.error) ** 2 for w, e in zip(weight, latest_first, strict=True))))
    return Estimate(mean, error)


def _sample(rows: np.ndarray) -> np.ndarray:
    """At most _SAMPLE of these rows, the same ones each time."""
    return rows if len(rows) <= _SAMPLE else np.random.default_rng(0).choice(rows, _SAMPLE, replace=False)
