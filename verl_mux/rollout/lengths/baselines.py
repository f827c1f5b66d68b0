"""The predictors others are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_mux.rollout.lengths.rows import LengthRow, Prompt


class Fifo:
    """Says nothing, so that prompts keep the order they came in."""

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Nothing to learn."""

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Zeros, (prompts,)."""
        return np.zeros(len(prompts))


class PromptLength:
    """A longer prompt is expected to get a longer response."""

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Nothing to learn."""

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Characters of each prompt, (prompts,)."""
        return np.array([len(prompt.text) for prompt in prompts], dtype=np.float64)


class HistoryMean:
    """The running mean of all lengths seen under the prompt's id; the mean over all prompts for an unknown id."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, int]] = {}
        self._total, self._count = 0, 0

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Add these responses to the running means."""
        for row in rows:
            total, count = self._sums.get(row.prompt.id, (0, 0))
            self._sums[row.prompt.id] = (total + row.length, count + 1)
            self._total, self._count = self._total + row.length, self._count + 1

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Tokens, (prompts,)."""
        everyone = (self._total, max(1, self._count))
        sums = np.array([self._sums.get(prompt.id, everyone) for prompt in prompts], dtype=np.float64).reshape(-1, 2)
        return sums[:, 0] / sums[:, 1]


class Oracle:
    """Knows the answers: `reveal` is called with the lengths to come. For measurements only."""

    def __init__(self) -> None:
        self._lengths = np.zeros(0)

    def reveal(self, lengths: Sequence[int]) -> None:
        """Lengths of the very prompts the next `predict` is asked for, in that order."""
        self._lengths = np.array(lengths, dtype=np.float64)

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Nothing to learn."""

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Tokens, (prompts,).

        Raises:
            ValueError: not the prompts that were revealed.
        """
        if len(prompts) != len(self._lengths):
            raise ValueError(f"the oracle was told {len(self._lengths)} lengths and asked for {len(prompts)}")
        return self._lengths
