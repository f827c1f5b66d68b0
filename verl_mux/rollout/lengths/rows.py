"""What a length predictor reads: prompts, and the lengths their responses turned out to have."""

from __future__ import annotations

from dataclasses import dataclass


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
