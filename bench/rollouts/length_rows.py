"""The rows of a file of prompts and lengths: one JSON object a line, `{"id", "prompt", "epoch", "length"}`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.errors import UserError
from verl_mux.rollout.lengths.predictors import LengthRow, Prompt

_MAX_LENGTH = 2**31


def read_rows(file: Path, *, skip_bad: bool) -> tuple[list[LengthRow], list[str]]:
    """(rows, epochs ascending and otherwise in file order; one line of text for each bad line, if those are skipped).

    `prompt` is text or a list of chat messages. Several rows of one id and epoch are samples of one prompt group.

    Raises:
        UserError: no such file, no usable row, or a bad line and not skip_bad.
    """
    rows: list[LengthRow] = []
    bad: list[str] = []
    for number, line in _lines(file):
        try:
            rows.append(_row(line))
        except ValueError as error:
            bad.append(f"line {number}: {error}")
            if not skip_bad:
                raise UserError(f"{file} {bad[0]} (--skip-bad leaves such lines out)") from None
    if not rows:
        raise UserError(f"{file} holds no usable row{': ' + bad[0] if bad else ''}; a row is " + _SHAPE)
    return sorted(rows, key=lambda row: row.epoch), bad


_SHAPE = '{"id": text or number, "prompt": text, "epoch": integer, "length": integer of 0 or more}'


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def _row(line: bytes) -> LengthRow:
    try:
        given = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"expected an object {_SHAPE}, given {_short(given)}")
    missing = [key for key in ("id", "prompt", "epoch", "length") if key not in given]
    if missing:
        raise ValueError(f"{missing[0]} is missing; a row is {_SHAPE}")
    prompt = Prompt(_identity(given["id"]), _text(given["prompt"]))
    return LengthRow(prompt, _integer("epoch", given["epoch"], -_MAX_LENGTH), _integer("length", given["length"], 0))


def _identity(given: Any) -> str:
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise ValueError(f"id must be text or a whole number, given {_short(given)}")
    return str(given)


def _text(given: Any) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in given):
        return "\n".join(message["content"] for message in given)
    raise ValueError(f"prompt must be text or a list of messages with text contents, given {_short(given)}")


def _integer(key: str, given: Any, lowest: int) -> int:
    whole = isinstance(given, int | float) and not isinstance(given, bool) and given == given // 1
    if not whole or not lowest <= given < _MAX_LENGTH:
        raise ValueError(f"{key} must be an integer of {lowest} or more and below {_MAX_LENGTH}, given {_short(given)}")
    return int(given)


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 40 else f"{text[:37]}..."
