"""Traces of jobs: when each came, how long it would run alone, and on how many GPUs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path

import msgspec

from verl_mux.errors import UserError

COLUMNS = ("job", "arrival_h", "duration_h")
MAX_GPUS = 8192  # of one job on each side
MAX_HOURS = 1e5  # eleven years; every iteration of a job is replayed


class TraceRow(msgspec.Struct, frozen=True):
    """gpus: on each side; None where the trace does not say."""

    job: str
    arrival_h: float
    duration_h: float
    gpus: int | None = None


def read_trace(path: str | Path) -> list[TraceRow]:
    """Rows in order of arrival. Columns other than `job,arrival_h,duration_h[,gpus]` are left aside. Raises UserError
    that names the line for anything malformed."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="", strict=True)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{path}: column {missing[0]!r} is missing; a trace has {','.join(COLUMNS)}[,gpus]")
            rows = _unique(path, ((reader.line_num, _row(path, reader.line_num, fields)) for fields in reader))
    except OSError as error:
        raise UserError(f"cannot read trace {path}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a CSV file: {error}") from error
    if not rows:
        raise UserError(f"{path} has no jobs")
    return sorted(rows, key=lambda row: row.arrival_h)


def _row(path: str | Path, line: int, fields: dict[str, str | None]) -> TraceRow:
    texts = {column: text for column, text in fields.items() if text is not None}
    if "" in fields or len(texts) < len(fields):
        raise UserError(f"{path}, line {line}: expected {len(fields) - ('' in fields)} fields, as in the first line")
    name = texts["job"].strip()
    if not name:
        raise UserError(f"{path}, line {line}: job has no name")
    arrival = _number(path, line, "arrival_h", texts["arrival_h"])
    duration = _number(path, line, "duration_h", texts["duration_h"], positive=True)
    gpus = texts.get("gpus")
    return TraceRow(name, arrival, duration, _count(path, line, gpus) if gpus and gpus.strip() else None)


def _number(path: str | Path, line: int, column: str, text: str, positive: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_HOURS or (positive and value == 0):
        least = "above" if positive else "of at least"
        raise UserError(f"{path}, line {line}: {column} is {text!r}; a number {least} 0 and at most {MAX_HOURS:g} is needed")
    return value


def _count(path: str | Path, line: int, text: str) -> int:
    try:
        count = int(text)
    except ValueError:  # also for more digits than Python takes
        count = 0
    if not 0 < count <= MAX_GPUS:
        raise UserError(f"{path}, line {line}: gpus is {text!r}; a whole number from 1 to {MAX_GPUS} is needed")
    return count


def _unique(path: str | Path, rows: Iterable[tuple[int, TraceRow]]) -> list[TraceRow]:
    found: dict[str, TraceRow] = {}
    for line, row in rows:
        if row.job in found:
            raise UserError(f"{path}, line {line}: job {row.job!r} is there twice; job names are unique")
        found[row.job] = row
    return list(found.values())
