"""Early lengths of the same prompt group: its first finished samples say how long the rest will be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from verl_mux.rollout.lengths.rows import LengthRow, Prompt


class GroupEarly:
    """Mean log length of a prompt's samples in its latest epoch, pulled towards all prompts' mean by `base_samples` samples.

    Tell it of each sample as it finishes, and ask again for the samples still waiting. The lengths of one prompt group
    resemble each other more than anything else resembles them, so a few samples already settle the order.
    """

    def __init__(self, base_samples: float = 0.5) -> None:
        self._base_samples = base_samples
        self._latest: dict[str, tuple[int, float, int]] = {}  # epoch, sum of logs, samples
        self._log_sum, self._count = 0.0, 0

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Add finished samples; a newer epoch replaces the older one's."""
        for row in rows:
            log = math.log1p(row.length)
            epoch, total, count = self._latest.get(row.prompt.id, (row.epoch, 0.0, 0))
            if row.epoch > epoch:
                epoch, total, count = row.epoch, 0.0, 0
            if row.epoch == epoch:
                self._latest[row.prompt.id] = (epoch, total + log, count + 1)
            self._log_sum, self._count = self._log_sum + log, self._count + 1

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Log lengths, (prompts,)."""
        overall = self._log_sum / max(1, self._count)
        return np.array([self._score(prompt.id, overall) for prompt in prompts], dtype=np.float64)

    def _score(self, prompt_id: str, overall: float) -> float:
        _, total, count = self._latest.get(prompt_id, (0, 0.0, 0))
        return (total + self._base_samples * overall) / (count + self._base_samples)
