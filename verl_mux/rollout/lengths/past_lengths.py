"""How long each prompt's responses were, epoch by epoch.

A cell is one prompt in one epoch. Lengths are kept as sums, raw and of log(1 + length), so a prompt costs the same however
often it recurs; the last MAX_EPOCHS epochs are kept apart, older ones are added up in the first column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from verl_mux.rollout.lengths.rows import LengthRow, Prompt

MAX_EPOCHS = 8


class LengthHistory:
    """Tables of (prompts, epochs), prompts in the order they were first seen, `epochs` in the order of their numbers."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.num_rows = 0
        self._row_of_id: dict[str, int] = {}
        self._row_of_text: dict[int, int] = {}
        self._tables = np.zeros((4, 64, 0))  # count, sum of lengths, sum of logs, sum of squared logs
        self._last_seen = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._row_of_id)

    @property
    def count(self) -> np.ndarray:
        """Responses per cell."""
        return self._tables[0, : len(self)]

    @property
    def length_sum(self) -> np.ndarray:
        """Sum of lengths per cell, in tokens."""
        return self._tables[1, : len(self)]

    @property
    def log_mean(self) -> np.ndarray:
        """Mean of log(1 + length) per cell; NaN where there is no response."""
        with np.errstate(invalid="ignore"):
            return self._tables[2, : len(self)] / self.count

    @property
    def sample_variance(self) -> tuple[float, int]:
        """Variance of log(1 + length) between samples of the same cell, and its degrees of freedom."""
        count, _, total, squares = self._tables[:, : len(self)]
        freedom = int(np.maximum(count - 1, 0).sum())
        spread = squares - total**2 / np.maximum(count, 1)
        return float(np.maximum(spread, 0).sum() / max(1, freedom)), freedom

    def most_recent(self, limit: int) -> np.ndarray:
        """Up to `limit` rows, the most recently observed ones, ascending."""
        return np.sort(np.argsort(-self._last_seen[: len(self)], kind="stable")[:limit])

    def find(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Row of each prompt, by id, then by identical text; -1 where neither was seen: (prompts,) int64."""
        by_id, by_text = self._row_of_id, self._row_of_text
        return np.array([by_id[p.id] if p.id in by_id else by_text.get(_digest(p.text), -1) for p in prompts], dtype=np.int64)

    def add(self, rows: Iterable[LengthRow]) -> None:
        """Count these responses."""
        for row in rows:
            where, column = self._row(row.prompt), self._column(row.epoch)
            log = np.log1p(row.length)
            self._tables[:, where, column] += (1, row.length, log, log * log)
            self._last_seen[where] = self.num_rows = self.num_rows + 1

    def _row(self, prompt: Prompt) -> int:
        where = self._row_of_id.setdefault(prompt.id, len(self))
        if prompt.text:
            self._row_of_text[_digest(prompt.text)] = where
        if where >= self._tables.shape[1]:
            self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)], axis=1)
            self._last_seen = np.concatenate([self._last_seen, np.zeros_like(self._last_seen)])
        return where

    def _column(self, epoch: int) -> int:
        if epoch in self.epochs:
            return self.epochs.index(epoch)
        if len(self.epochs) == MAX_EPOCHS and epoch < self.epochs[0]:
            return 0
        where = int(np.searchsorted(self.epochs, epoch))
        self.epochs.insert(where, epoch)
        self._tables = np.insert(self._tables, where, 0, axis=2)
        if len(self.epochs) > MAX_EPOCHS:
            self._merge_oldest()
        return self.epochs.index(epoch)

    def _merge_oldest(self) -> None:
        self._tables[:, :, 1] += self._tables[:, :, 0]
        self._tables = self._tables[:, :, 1:].copy()
        del self.epochs[0]


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
