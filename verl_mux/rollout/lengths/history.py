"""Per-prompt history: by id, else by identical text, else from the prompts with the most similar text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_mux.rollout.lengths.past_lengths import LengthHistory
from verl_mux.rollout.lengths.prompt_features import BUCKETS, PromptFeatures, describe
from verl_mux.rollout.lengths.rows import LengthRow, Prompt

_NEIGHBOURS = 16
_MAX_COMPARED = 4096
_BLOCK = 256


class History:
    """Mean log length of the prompt; for an unknown one, of its nearest prompts weighted by the words they share."""

    def __init__(self) -> None:
        self._history = LengthHistory()
        self._words: dict[int, np.ndarray] = {}

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Add these responses; the last few thousand prompts are kept for comparison."""
        self._history.add(rows)
        for at, row in zip(self._history.find([row.prompt for row in rows]).tolist(), rows, strict=True):
            words = self._words.pop(at, None)
            self._words[at] = describe(row.prompt.text).words if words is None else words
        for oldest in list(self._words)[: max(0, len(self._words) - _MAX_COMPARED)]:
            del self._words[oldest]

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Log lengths, (prompts,); zeros before the first row."""
        if not prompts or not len(self._history):
            return np.zeros(len(prompts))
        means = np.nanmean(self._history.log_mean, axis=1)
        rows = self._history.find(prompts)
        out = means[rows]
        unknown = np.flatnonzero(rows < 0)
        for start in range(0, len(unknown), _BLOCK):
            block = unknown[start : start + _BLOCK]
            out[block] = self._from_neighbours([describe(prompts[at].text) for at in block.tolist()], means)
        return out

    def _from_neighbours(self, features: Sequence[PromptFeatures], means: np.ndarray) -> np.ndarray:
        similarity = _shared_words([f.words for f in features], list(self._words.values()))
        lengths, overall = means[np.array(list(self._words))], means.mean()
        nearest = np.argsort(-similarity, axis=1)[:, :_NEIGHBOURS]
        weight = np.take_along_axis(similarity, nearest, axis=1) ** 2
        # The overall mean counts as one weak neighbour, for prompts that resemble none.
        return ((weight * lengths[nearest]).sum(axis=1) + 0.05 * overall) / (weight.sum(axis=1) + 0.05)


def _shared_words(asked: Sequence[np.ndarray], known: Sequence[np.ndarray]) -> np.ndarray:
    """Cosine similarity of word sets: (asked, known) float64."""
    out = np.zeros((len(asked), len(known)))
    buckets = np.concatenate(known)
    owner = np.repeat(np.arange(len(known)), [len(words) for words in known])
    present = np.zeros(BUCKETS, dtype=bool)
    for row, words in enumerate(asked):
        present[words] = True
        out[row] = np.bincount(owner[present[buckets]], minlength=len(known))
        present[words] = False
    sizes = np.outer([max(1, len(words)) for words in asked], [max(1, len(words)) for words in known])
    return out / np.sqrt(sizes)
