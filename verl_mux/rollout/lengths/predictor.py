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


# name -> (module, class, extra it needs)
PREDICTORS: dict[str, tuple[str, str, str | None]] = {
    "default": ("default", "DefaultPredictor", None),
    "fifo": ("baselines", "Fifo", None),
    "prompt_length": ("baselines", "PromptLength", None),
    "history_mean": ("baselines", "HistoryMean", None),
    "heuristic": ("heuristic", "Heuristic", None),
    "history": ("history", "History", None),
    "group_early": ("group_early", "GroupEarly", None),
    "ranker": ("ranker", "Ranker", "predictor"),
}


def make_predictor(name: str) -> LengthPredictor:
    """A fresh predictor of this name.

    Raises:
        UserError: an unknown name, or an extra that is not installed.
    """
    if name not in PREDICTORS:
        raise UserError(f"unknown length predictor {name!r}; allowed: {', '.join(PREDICTORS)}")
    module, class_name, extra = PREDICTORS[name]
    try:
        return getattr(importlib.import_module(f"verl_mux.rollout.lengths.{module}"), class_name)()
    except (ImportError, OSError) as error:  # OSError: lightgbm is there, its OpenMP library is not
        needed = f"pip install 'verl-mux[{extra}]'" if extra else "pip install numpy"
        raise UserError(f"length predictor {name!r} cannot be loaded ({error}); {needed}, or choose another") from None
