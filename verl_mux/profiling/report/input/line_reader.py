"""Turn bytes into a data frame of events, a piece of a file at a time; count what cannot be read, by reason.

A line is skipped when it is no JSON object, lacks `timestamp` or `event`, has a known top-level key of the wrong type or an
impossible value, or a wrong clock (clock.py). A value of the wrong type inside `extra` is dropped and counted; the rest of
the line is kept. Also reads the decode lines of an SGLang server's text log. Runs in the report's processes; called by
run_log.py.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import polars as pl

from verl_mux.profiling.plain.lines import LogFile, printable
from verl_mux.profiling.report.input.clock import Faults, Where, mend
from verl_mux.profiling.report.input.reduction import EXTRA_KEYS, EXTRA_TYPES, NO_EXTRA, Extra, Line, marked

MAX_LINE_BYTES = 2**20
MAX_SECONDS = 1e9  # about 32 years
FAR_SECONDS = 86_400.0  # no step lasts a day: a lone line that far from its file's middle has a wrong clock

_decode_lines = msgspec.json.Decoder(Line).decode_lines
_SURROGATE = re.compile("[\ud800-\udfff]")

# column -> (type, field of Line or of Extra)
LINE_COLUMNS: dict[str, tuple[Any, str]] = {
    "timestamp": (pl.String, "timestamp"),
    "event": (pl.String, "event"),
    "seconds": (pl.Float64, "duration_sec"),
    "worker": (pl.Int64, "workid"),
    "step": (pl.Int64, "step"),
    "role": (pl.String, "role"),
    "job": (pl.String, "job"),
    "run": (pl.String, "run"),
}
EXTRA_COLUMNS: dict[str, tuple[Any, str]] = {
    "turn": (pl.Float64, "turn"),
    "turns": (pl.Int64, "turns"),
    "validate": (pl.Boolean, "validate"),
    "stay": (pl.Int64, "stay"),
}
TOKENS = ("generated_tokens", "response_tokens", "actual_response_tokens", "response_length")  # the first that is there


@dataclass(frozen=True)
class Block:
    """Lines of a file that were read together. `numbers`: which lines of the file they are, counted from byte `start` on."""

    file: LogFile
    start: int
    lines: list[Line]
    numbers: Sequence[int]

    def where(self, index: int) -> str:
        return _where(self.file.path, self.start, self.numbers[index])


def _where(path: str, start: int, number: int) -> str:
    """Lines before `start` belong to another piece of the file and are not counted: that would mean to read them twice."""
    return printable(f"{path}, line {number}" + (f" after byte {start}" if start else ""))


def read_lines(file: LogFile, start: int, stop: int, faults: Faults) -> Iterator[Block]:
    """The lines that begin in bytes [start, stop) of a file, about a megabyte of them at a time."""
    try:
        for number, count, raw in _blocks(file.path, start, stop, faults):
            yield Block(file, start, *_decode(raw, number, count, lambda n: _where(file.path, start, n), faults))
    except OSError as error:
        faults.skip("unreadable file", f"{printable(file.path)}: {error.strerror}")


def _blocks(path: str, start: int, stop: int, faults: Faults) -> Iterator[tuple[int, int, bytes]]:
    """(number of the first line, how many, whole lines): none longer than MAX_LINE_BYTES, however long the file's are."""
    number = 1
    with open(path, "rb") as stream:
        if start:
            stream.seek(start - 1)
            _skip_line(stream)
        while (position := stream.tell()) < stop:
            block = stream.read(min(MAX_LINE_BYTES, stop - position))
            enormous = False
            if not block.endswith(b"\n"):
                whole = block.rfind(b"\n") + 1
                line = block[whole:] + stream.readline(MAX_LINE_BYTES)
                enormous = len(line) > MAX_LINE_BYTES
                if enormous and not line.endswith(b"\n"):
                    _skip_line(stream)
                block = block[:whole] if enormous else block[:whole] + line
            count = block.count(b"\n") + (block[-1:] not in (b"", b"\n"))
            yield number, count, block
            number += count
            if enormous:
                faults.skip("line over 1 MiB", _where(path, start, number))
                number += 1


def _skip_line(stream: BinaryIO) -> None:
    while (piece := stream.readline(MAX_LINE_BYTES)) and not piece.endswith(b"\n"):
        pass


def _decode(block: bytes, number: int, count: int, where: Where, faults: Faults) -> tuple[list[Line], Sequence[int]]:
    """The lines of a block of `count`, and the number of each; blank ones are no lines."""
    try:
        lines = _decode_lines(block)
        if len(lines) == count:
            return lines, range(number, number + count)
        return lines, [number + i for i, raw in enumerate(block.split(b"\n")) if raw.strip()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    raws = [(number + i, raw) for i, raw in enumerate(block.split(b"\n")) if raw.strip()]
    kept = [(line, n) for n, raw in raws for line in _decode_one(raw, where(n), faults)]
    return [line for line, _ in kept], [n for _, n in kept]


def _decode_one(raw: bytes, where: str, faults: Faults) -> list[Line]:
    try:
        return _decode_lines(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        given = _plain_text(json.loads(raw), where, faults)  # knows NaN and Infinity, which Python programs write
    except (ValueError, RecursionError):
        faults.skip("not JSON (torn line?)", where)
        return []
    return _salvage(given, where, faults)


def _plain_text(given: Any, where: str, faults: Faults) -> Any:
    """Half of a surrogate pair is JSON, yet no text that a table or a terminal takes: it is spelled out, as `\\ud800`."""
    text = json.dumps(given, ensure_ascii=False)
    if not _SURROGATE.search(text):
        return given
    faults.notice("half a surrogate pair in a text", where)
    return json.loads(_SURROGATE.sub(lambda half: f"\\\\u{ord(half[0]):04x}", text))


def _salvage(given: Any, where: str, faults: Faults) -> list[Line]:
    if not isinstance(given, dict):
        faults.skip("not a JSON object", where)
        return []
    extra = given.pop("extra", None)
    if isinstance(extra, dict):
        given["extra"] = _salvage_extra(extra, where, faults)
    elif extra is not None:
        faults.skip("wrong type: extra", where)
        return []
    try:
        return [msgspec.convert(given, Line)]
    except (msgspec.ValidationError, RecursionError) as error:
        faults.skip(_reason(given, str(error)), where)
        return []


def _reason(given: dict, message: str) -> str:
    for key in ("timestamp", "event"):
        if key not in given:
            return f"missing: {key}"
    key = message.rpartition("$.")[2].strip("`") or "line"
    negative = type(given.get(key)) is int and given[key] < 0
    return f"negative {key}" if negative else f"wrong type: {key}"


def _salvage_extra(extra: dict, where: str, faults: Faults) -> Extra:
    kept = {}
    for key in EXTRA_KEYS.intersection(extra):
        try:
            kept[key] = msgspec.convert(extra[key], EXTRA_TYPES[key])
        except (msgspec.ValidationError, RecursionError):
            faults.notice(f"wrong type: extra.{key}", where)
    return Extra(**kept)


def to_frame(blocks: list[Block], faults: Faults) -> pl.DataFrame:
    """A row an event, files in order: the columns above, with `end` (epoch seconds) for `timestamp`.

    `line` is the row's index among all lines given; `job` is marked with its run (`marked`).
    Local time is read as UTC, for the format does not say where it was
    local. Where a line is silent, its path speaks. Lines with impossible values are counted and left out.
    """
    files = list(dict.fromkeys(block.file for block in blocks))
    lines = [line for block in blocks for line in block.lines]
    for line in lines:
        if line.request_id is not None:
            _move_down(line)
    extras = [line.extra or NO_EXTRA for line in lines]
    columns = [_column(name, kind, lines, key) for name, (kind, key) in LINE_COLUMNS.items()]
    columns += [_column(name, kind, extras, key) for name, (kind, key) in EXTRA_COLUMNS.items()]
    columns.append(pl.Series("request_id", _request_ids(extras), pl.String))
    place = {file: place for place, file in enumerate(files)}
    index = pl.Series("file", np.repeat([place[b.file] for b in blocks], [len(b.lines) for b in blocks]), pl.Int64)
    frame = pl.DataFrame(columns).with_columns(
        *(pl.col(name).fill_null(_from_path(name, files, index)) for name in ("worker", "step", "role", "job")),
        *_end(columns[0]),
        _tokens(extras),
        index,
        pl.int_range(pl.len()).alias("line"),
    )
    frame = frame.with_columns(marked("job", "run")).drop("run")
    where = _finder(blocks)
    frame = _drop_impossible(frame.drop("timestamp"), where, faults)
    return mend(frame, files, where, faults).drop("file")


def _finder(blocks: list[Block]) -> Where:
    """Says of a row's `line` where it stands."""
    firsts = np.cumsum([0, *(len(block.lines) for block in blocks)]).tolist()

    def where(line: int) -> str:
        at = bisect.bisect_right(firsts, line) - 1
        return blocks[at].where(line - firsts[at])

    return where


def _move_down(line: Line) -> None:
    """A request named at the top of a line is named in its `extra` from here on."""
    line.extra = line.extra or Extra()
    if line.extra.request_id is None:
        line.extra.request_id = line.request_id
    if line.extra.turn is None:
        line.extra.turn = line.turn


def _from_path(name: str, files: list[LogFile], index: pl.Series) -> pl.Series:
    values = pl.Series(name, [getattr(file, name) for file in files], LINE_COLUMNS[name][0])
    return values.gather(index)


def _column(name: str, kind: Any, rows: list, key: str) -> pl.Series:
    return pl.Series(name, list(map(attrgetter(key), rows)), kind)


def _request_ids(extras: list[Extra]) -> list[str | None]:
    return [name if name is None or type(name) is str else str(name) for name in map(attrgetter("request_id"), extras)]


def _tokens(extras: list[Extra]) -> pl.Series:
    found = pl.select(
        pl.coalesce(_column(key, pl.Float64, extras, key) for key in TOKENS).cast(pl.Int64, strict=False).alias("tokens")
    )
    return found.to_series()


def _end(stamps: pl.Series) -> list[pl.Series]:
    """`end`, and `zoned`: whether the stamp names a time zone."""
    parsed = stamps.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us", strict=False)
    zoned = pl.repeat(False, len(stamps), eager=True)
    if parsed.null_count():
        odd = parsed.is_null()
        slow = [_parse(stamp) for stamp in stamps.filter(odd)]
        times = [None if read is None else _as_utc(read) for read in slow]
        parsed = parsed.zip_with(~odd, pl.Series(parsed.name, _spread(times, odd), dtype=pl.Datetime("us")))
        named = [read is not None and read.tzinfo is not None for read in slow]
        zoned = pl.Series(_spread(named, odd), dtype=pl.Boolean).fill_null(False)
    return [(parsed.dt.epoch("us") / 1e6).alias("end"), zoned.alias("zoned")]


def _spread(values: list, mask: pl.Series) -> list:
    given = iter(values)
    return [next(given) if here else None for here in mask]


def _parse(stamp: str) -> datetime | None:
    """Other ISO 8601 spellings, of a date with a time of day."""
    stamp = stamp.strip()
    if len(stamp) <= len("2025-08-11"):
        return None
    try:
        read = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
        _as_utc(read)
        return read
    except (ValueError, OverflowError):
        return None


def _as_utc(read: datetime) -> datetime:
    """One with an offset is read as the UTC time it names."""
    return read.astimezone(timezone.utc).replace(tzinfo=None) if read.tzinfo else read


def parse_time(stamp: str) -> float | None:
    """A time stamp in seconds since the epoch, as `to_frame` reads it; None if it is none."""
    read = _parse(stamp)
    return None if read is None else _as_utc(read).replace(tzinfo=timezone.utc).timestamp()


def _drop_impossible(frame: pl.DataFrame, where: Where, faults: Faults) -> pl.DataFrame:
    end, seconds = pl.col("end"), pl.col("seconds")
    far = (end - end.median().over("file")).abs() > FAR_SECONDS
    checks = {
        "unreadable timestamp": end.is_null(),
        "negative duration": seconds < 0,
        "impossible duration": (seconds > MAX_SECONDS) | ~seconds.is_finite(),
        "timestamp a day or more from the rest of its file": far & (far.mean().over("file") <= 0.1),
    }
    for reason, check in checks.items():
        bad = frame.select(check.fill_null(False)).to_series()
        if bad.any():
            faults.skip(reason, where(frame["line"].filter(bad)[0]), int(bad.sum()))
            frame = frame.filter(~bad)
    return frame


_DECODE_LINE = re.compile(r"Decode batch")
_LOG_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_FIELDS = {
    "running": re.compile(r"#running-req:\s*(\d+)"),
    "queued": re.compile(r"#queue-req:\s*(\d+)"),
    "token_usage": re.compile(r"token usage:\s*([\d.]+)"),
    "tokens_per_sec": re.compile(r"gen throughput \(token/s\):\s*([\d.]+)"),
}
ENGINE_SCHEMA = {"job": pl.String, "worker": pl.Int64, "node": pl.String, "step": pl.Int64, "end": pl.Float64} | dict.fromkeys(
    _FIELDS, pl.Float64
)


def read_engine_log(path: str | Path, worker: int = 0) -> pl.DataFrame:
    """A row a decode line of one text log: ENGINE_SCHEMA; `end` null where the line has no time, fields null where it
    lacks them.
    """
    rows = []
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if len(line) < 4096 and _DECODE_LINE.search(line):
                rows.append({"job": "", "worker": worker, "node": None, "step": None, "end": _log_time(line)} | _fields(line))
    return pl.DataFrame(rows, schema=ENGINE_SCHEMA)


def _fields(line: str) -> dict[str, float | None]:
    found = {name: pattern.search(line) for name, pattern in _FIELDS.items()}
    return {name: _number(match[1]) if match else None for name, match in found.items()}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _log_time(line: str) -> float | None:
    match = _LOG_TIME.search(line)
    return parse_time(match[1].replace(",", ".").replace(" ", "T")) if match else None
