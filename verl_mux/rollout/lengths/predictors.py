"""Length predictors: what they read, their names, and the simple ones.

Runs in the trainer; called by rollout/control. Pure. A predictor gives an order, not a number of tokens: only comparisons between
scores of one `predict` mean something.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from verl_mux.errors import UserError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to be answered.

    id: the same over epochs and over the samples of one prompt group.
    token_limit: this request's `max_tokens`, where requests differ in it.
    """

    id: str
    text: str
    token_limit: int | None = None


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
    "heuristic": ("predictors", "Heuristic"),
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


# Effect on log length. Stems, matched at a word's start; the escaped ones are Chinese.
KEYWORDS = {
    "in detail": 0.8, "detailed": 0.8, "step by step": 0.7, "explain": 0.5, "essay": 1.0, "story": 0.9, "article": 0.9,
    "report": 0.7, "prove": 0.8, "proof": 0.8, "derive": 0.7, "compare": 0.5, "write a": 0.4, "implement": 0.6,
    "code": 0.4, "program": 0.4, "letter": 0.5, "plan": 0.4, "why": 0.3, "how": 0.2,
    "summar": -0.5, "translat": -0.5, "list": -0.2, "define": -0.4, "name": -0.6, "briefly": -0.7, "brief": -0.5,
    "short": -0.4, "concise": -0.6, "one word": -1.5, "one sentence": -1.2, "yes or no": -1.5, "true or false": -1.3,
    "choose": -0.6, "classify": -0.9, "which of the following": -0.6, "what is": -0.3, "who": -0.5, "when": -0.4,
    "\u603b\u7ed3": -0.5, "\u6458\u8981": -0.5, "\u7ffb\u8bd1": -0.5, "\u7b80\u8981": -0.6, "\u5217\u51fa": -0.2,
    "\u8be6\u7ec6": 0.8, "\u6545\u4e8b": 0.9, "\u6df1\u5165": 0.7, "\u62a5\u544a": 0.7, "\u8bc1\u660e": 0.8,
}  # fmt: skip
_KEYWORD = re.compile("|".join(rf"\b{k}" if k.isascii() else k for k in sorted(KEYWORDS, key=len, reverse=True)))
_ASKED = re.compile(r"(\d{1,5})[- ]?(word|sentence|paragraph|page|line|token)s?\b")
_TOKENS_PER = {"word": 1.4, "sentence": 25.0, "paragraph": 110.0, "page": 650.0, "line": 12.0, "token": 1.0}
_TYPICAL_LENGTH = 250.0  # tokens; what a prompt without any sign is taken for
_PROMPT_EXPONENT = 0.1  # a weak sign, in some tasks none or the reverse
_READ_CHARS = 4096


class Heuristic:
    """Tokens guessed from a prompt alone: words that ask for much or little, a length that is asked for, the token limit."""

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Nothing to learn."""

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Tokens, (prompts,)."""
        return _array([guess(prompt) for prompt in prompts])


def guess(prompt: Prompt) -> float:
    """Tokens one prompt's response may take."""
    text = prompt.text[:_READ_CHARS].lower()
    asked = [float(n) * _TOKENS_PER[unit] for n, unit in _ASKED.findall(text)]
    effect = sum(KEYWORDS[word] for word in set(_KEYWORD.findall(text)))
    free = _TYPICAL_LENGTH * math.exp(max(-3.0, min(3.0, effect))) * (1 + len(prompt.text)) ** _PROMPT_EXPONENT
    expected = max(asked) if asked else free
    return expected if prompt.token_limit is None else min(expected, prompt.token_limit)
