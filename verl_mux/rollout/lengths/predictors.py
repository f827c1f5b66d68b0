"""Length predictors: what they read, their names, and the simple ones.

Runs in the trainer; called by rollout/control. Pure. A predictor gives an order, not a number of tokens: only comparisons between
scores of one `predict` mean something.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from verl_mux.errors import UserError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to be answered. id: the same over epochs and over the samples of one prompt group."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class LengthRow:
    """One finished response: `length` tokens for `prompt` in `epoch`. Samples of one prompt group are rows of their own."""

    prompt: Prompt
    epoch: int
    length: int


class LengthPredictor(Protocol):
    """observe(finished responses) whenever there are some; predict(prompts) whenever an order is wanted."""

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Learn from finished responses. Cheap: fitting waits for the next `predict`."""

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """(prompts,) float64, higher for longer; equal where it cannot tell, so that a stable sort is FIFO."""


# name -> (module, class)
PREDICTORS: dict[str, tuple[str, str]] = {
    "default": ("learned", "Learned"),
    "fifo": ("predictors", "Fifo"),
    "history": ("predictors", "History"),
}


def make_predictor(name: str) -> LengthPredictor:
    """A fresh predictor of this name. Raises UserError: there is none."""
    if name not in PREDICTORS:
        raise UserError(f"unknown length predictor {name!r}; allowed: {', '.join(PREDICTORS)}")
    module, class_name = PREDICTORS[name]
    return getattr(importlib.import_module(f"verl_mux.rollout.lengths.{module}"), class_name)()


def _array(values: Sequence[float]) -> np.ndarray:
    import numpy

    return numpy.array(values, dtype=numpy.float64)


class Fifo:
    """Says nothing, so that prompts keep the order they came in."""

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Nothing to learn."""

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Zeros, (prompts,)."""
        return _array([0.0] * len(prompts))


class History:
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
        sums = [self._sums.get(prompt.id, everyone) for prompt in prompts]
        return _array([total / count for total, count in sums])
