"""Length predictors: one interface, and the table of their names.

A predictor gives an order and not a number of tokens: only comparisons between scores of one `predict` mean something.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from verl_mux.errors import UserError
from verl_mux.rollout.lengths.rows import LengthRow, Prompt

if TYPE_CHECKING:
    import numpy as np


class LengthPredictor(Protocol):
    """observe(finished responses) whenever there are some; predict(prompts) whenever an order is wanted."""

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Learn from finished responses. Cheap: fitting waits for the next `predict`."""

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """(prompts,) float64, higher for longer; equal where it cannot tell, so that a stable sort is FIFO."""


# name -> (module, class)
PREDICTORS: dict[str, tuple[str, str]] = {
    "default": ("default", "DefaultPredictor"),
    "fifo": ("baselines", "Fifo"),
    "prompt_length": ("baselines", "PromptLength"),
    "history_mean": ("baselines", "HistoryMean"),
    "heuristic": ("heuristic", "Heuristic"),
    "history": ("history", "History"),
    "group_early": ("group_early", "GroupEarly"),
}


def make_predictor(name: str) -> LengthPredictor:
    """A fresh predictor of this name. Raises UserError: there is none."""
    if name not in PREDICTORS:
        raise UserError(f"unknown length predictor {name!r}; allowed: {', '.join(PREDICTORS)}")
    module, class_name = PREDICTORS[name]
    return getattr(importlib.import_module(f"verl_mux.rollout.lengths.{module}"), class_name)()
