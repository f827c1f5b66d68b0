"""How long a prompt's responses are expected to be, in numbers: from its own earlier ones, else from what a predictor says of it.

With earlier responses: their mean, drawn towards all prompts' mean by as much as chance moves it (credibility: Z x + (1 - Z) m
with Z = a / (a + v / n), Buehlmann 1967; a: variance between prompts, v: of one prompt's responses, n: how many of them).

Without: a predictor gives an order and no tokens, and what a rank is worth depends on how good the order is. Ranks are put into
bins, and a bin's lengths are those that prompts of its ranks turned out to have. Before there are any the order is taken to be
perfect, which overstates the long ranks: whoever bounds a mean with it stays on the safe side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from verl_mux.rollout.lengths.predictor import LengthPredictor
from verl_mux.rollout.lengths.rows import LengthRow, Prompt

# Lower ends of the bins of ranks: the tail is where ranks differ.
_EDGES = np.array([0.0, 0.25, 0.5, 0.75, 0.875, 0.9375, 0.96875, 0.984375])
_PRIOR_GROUPS = 8.0  # what the perfect order counts for in each bin
_REMEMBERED = 4096  # prompt groups whose lengths say how prompts in general are
_EPOCHS = 2  # of a prompt's own responses


class Expected(NamedTuple):
    """Of each prompt group, (prompts,) in tokens: mean length of its responses, that mean's variance, and what it is ordered by.

    order_by: the mean, where nobody can tell how far a group's longest response lies above it; an oracle knows the longest.
    """

    mean: np.ndarray
    variance: np.ndarray
    order_by: np.ndarray


class LengthEstimates:
    """observe(a prompt group's lengths) when it has been trained; expect(prompts) before any of them is drawn.

    samples: responses of a prompt group.
    """

    def __init__(self, predictor: LengthPredictor, samples: int) -> None:
        self._predictor, self._samples = predictor, samples
        self._own: dict[str, deque[int]] = {}
        self._spread: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # mean and variance of a group's lengths
        self._ranks: dict[str, float] = {}  # of prompts without a past, as they were predicted
        self._bins = np.zeros((3, len(_EDGES)))  # count, sum, sum of squares, of lengths over the mean of all

    def observe(self, prompt: Prompt, epoch: int, lengths: Sequence[int]) -> None:
        """A prompt group was trained, with these lengths in tokens."""
        self._predictor.observe([LengthRow(prompt, epoch, length) for length in lengths])
        own = self._own.setdefault(prompt.id, deque(maxlen=_EPOCHS * self._samples))
        own.extend(lengths)
        mean = float(np.mean(lengths))
        self._spread.append((mean, float(np.var(lengths, ddof=1)) if len(lengths) > 1 else 0.0))
        rank = self._ranks.pop(prompt.id, None)
        if rank is not None:
            relative = mean / max(self._overall(), 1e-9)
            self._bins[:, _bin(np.array([rank]))[0]] += (1.0, relative, relative**2)

    def expect(self, prompts: Sequence[Prompt]) -> Expected:
        """All alike before the first group was observed."""
        mean, variance = np.ones(len(prompts)), np.zeros(len(prompts))
        if not self._spread or not prompts:
            return Expected(mean, variance, mean)
        known = np.array([prompt.id in self._own for prompt in prompts])
        mean[known], variance[known] = self._from_own([p.id for p, has in zip(prompts, known, strict=True) if has])
        strangers = [p for p, has in zip(prompts, known, strict=True) if not has]
        mean[~known], variance[~known] = self._from_order(strangers)
        return Expected(mean, variance, mean)

    def knows(self, prompt: Prompt) -> bool:
        """Has it had responses before? What others teach says little of it then."""
        return prompt.id in self._own

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: each prompt's own lengths. What the predictor has read is not kept."""
        return {"own": {id: list(lengths) for id, lengths in self._own.items()}, "spread": list(self._spread)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Resume."""
        self._own = {id: deque(its, maxlen=_EPOCHS * self._samples) for id, its in saved["own"].items()}
        self._spread.extend((mean, variance) for mean, variance in saved["spread"])

    # ----------------------------------------------------------------

    def _overall(self) -> float:
        return float(np.mean([mean for mean, _ in self._spread]))

    def _from_own(self, ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and the variance of the next group's mean. Chance grows with the length, so it is a prompt's own:
        v = chance * length^2. Only how far means are drawn towards that of all goes by the v of all: long ones would shrink."""
        means, variances = np.array(self._spread).T
        overall = float(means.mean())
        chance = float(variances.sum() / max((means**2).sum(), 1e-9))
        within = float(variances.mean())
        between = max(float(means.var()) - within / self._samples, 1e-9)
        own = np.array([np.mean(self._own[id]) for id in ids])
        count = np.array([len(self._own[id]) for id in ids])
        credibility = between / (between + within / np.maximum(count, 1))
        expected = credibility * own + (1 - credibility) * overall
        chances = chance * expected**2
        unknown = chances * between / (chances + count * between)  # of the prompt's own mean
        return expected, unknown + chances / self._samples

    def _from_order(self, prompts: Sequence[Prompt]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and the variance of the group's mean."""
        means = np.array([mean for mean, _ in self._spread])
        overall = float(means.mean())
        scores = self._predictor.predict(prompts) if prompts else np.zeros(0)
        if len(prompts) < 2 or np.ptp(scores) == 0:
            return np.full(len(prompts), overall), np.full(len(prompts), float(means.var()))
        ranks = ranks_of(scores)
        self._ranks |= dict(zip((prompt.id for prompt in prompts), ranks.tolist(), strict=True))
        count, total, squares = self._bins + _PRIOR_GROUPS * _perfect(means / max(overall, 1e-9))
        mean = np.maximum.accumulate(total / count)  # a higher rank is never expected to be shorter
        variance = np.maximum(squares / count - (total / count) ** 2, 0.0)
        bins = _bin(ranks)
        # Within a bin too the order counts: a little, so that it decides among equals.
        return overall * mean[bins] * (1 + 1e-6 * ranks), overall**2 * variance[bins]


def ranks_of(scores: np.ndarray) -> np.ndarray:
    """Share of the others below each, in [0, 1), ties in their middle: (prompts,) float64."""
    ordered = np.sort(scores)
    low, high = np.searchsorted(ordered, scores, side="left"), np.searchsorted(ordered, scores, side="right")
    return (low + high) / 2 / (len(scores) + 1e-9)


def _bin(ranks: np.ndarray) -> np.ndarray:
    return np.searchsorted(_EDGES, ranks, side="right") - 1


def _perfect(past: np.ndarray) -> np.ndarray:
    """Moments of each bin, did the order sort these: (3, bins)."""
    cuts = (_EDGES[1:] * len(past)).astype(int)
    parts = np.split(np.sort(past), cuts) if len(past) * (1 - _EDGES[-1]) > 1 else [past] * len(_EDGES)
    return np.array([np.ones(len(_EDGES)), [part.mean() for part in parts], [(part**2).mean() for part in parts]])
