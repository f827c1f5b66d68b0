"""The decode lines that an SGLang server prints, as events of its replica.

    [2025-08-11 23:19:45] Decode batch. #running-req: 1, #token: 910, token usage: 0.00, gen throughput (token/s):
    485.10, #queue-req: 0

Lines without a time keep their order only: they count for throughput, not for the time line.
"""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl

from verl_mux.profiling.report.input.line_reader import parse_time

_DECODE = re.compile(r"Decode batch")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_FIELDS = {
    "running": re.compile(r"#running-req:\s*(\d+)"),
    "queued": re.compile(r"#queue-req:\s*(\d+)"),
    "token_usage": re.compile(r"token usage:\s*([\d.]+)"),
    "tokens_per_sec": re.compile(r"gen throughput \(token/s\):\s*([\d.]+)"),
}
SCHEMA = {"job": pl.String, "worker": pl.Int64, "node": pl.String, "step": pl.Int64, "end": pl.Float64} | dict.fromkeys(
    _FIELDS, pl.Float64
)


def read_engine_log(path: str | Path, worker: int = 0) -> pl.DataFrame:
    """A row a decode line of one text log: SCHEMA; `end` null where the line has no time, fields null where it
    lacks them.
    """
    rows = []
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if len(line) < 4096 and _DECODE.search(line):
                rows.append({"job": "", "worker": worker, "node": None, "step": None, "end": _time(line)} | _fields(line))
    return pl.DataFrame(rows, schema=SCHEMA)


def _fields(line: str) -> dict[str, float | None]:
    found = {name: pattern.search(line) for name, pattern in _FIELDS.items()}
    return {name: _number(match[1]) if match else None for name, match in found.items()}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _time(line: str) -> float | None:
    match = _TIME.search(line)
    return parse_time(match[1].replace(",", ".").replace(" ", "T")) if match else None
