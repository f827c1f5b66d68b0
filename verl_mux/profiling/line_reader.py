"""From bytes to a data frame of events, a piece of a file at a time; what cannot be read is counted by name.

A line is skipped when it is no JSON object, lacks `timestamp` or `event`, or has a known top-level key of the wrong
type. A value of the wrong type inside `extra` is dropped and counted; the rest of its line is kept.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from operator import attrgetter
from typing import Any, BinaryIO

import msgspec
import numpy as np
import polars as pl

from verl_mux.profiling.line import EXTRA_KEYS, EXTRA_TYPES, NO_EXTRA, Extra, Line
from verl_mux.profiling.log_files import LogFile

MAX_LINE_BYTES = 2**20
MAX_SECONDS = 1e9  # about 32 years
FAR_SECONDS = 86_400.0  # no step lasts a day: a lone line that far from its file's middle has a wrong clock
BACK_SECONDS = 1.0

_decode_lines = msgspec.json.Decoder(Line).decode_lines

# column -> (type, field of Line or of Extra)
LINE_COLUMNS: dict[str, tuple[Any, str]] = {
    "timestamp": (pl.String, "timestamp"),
    "event": (pl.String, "event"),
    "seconds": (pl.Float64, "duration_sec"),
    "worker": (pl.Int64, "workid"),
    "step": (pl.Int64, "step"),
    "role": (pl.String, "role"),
    "job": (pl.String, "job"),
}
EXTRA_COLUMNS: dict[str, tuple[Any, str]] = {
    "turn": (pl.Float64, "turn"),
    "turns": (pl.Int64, "turns"),
    "prompt_tokens": (pl.Int64, "prompt_tokens"),
    "queue_sec": (pl.Float64, "queue_sec"),
    "finish_reason": (pl.String, "finish_reason"),
    "validate": (pl.Boolean, "validate"),
}
TOKENS = ("generated_tokens", "response_tokens", "actual_response_tokens", "response_length")  # the first that is there


@dataclass
class Faults:
    """What was wrong with the input. `skipped`: lines lost, by reason. `noticed`: lines kept, by what was odd."""

    skipped: collections.Counter = field(default_factory=collections.Counter)
    noticed: collections.Counter = field(default_factory=collections.Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first place it was met

    def skip(self, reason: str, where: str, count: int = 1) -> None:
        self.skipped[reason] += count
        self.examples.setdefault(reason, where)

    def notice(self, reason: str, where: str, count: int = 1) -> None:
        self.noticed[reason] += count
        self.examples.setdefault(reason, where)

    def add(self, other: Faults) -> None:
        self.skipped.update(other.skipped)
        self.noticed.update(other.noticed)
        for reason, where in other.examples.items():
            self.examples.setdefault(reason, where)


def read_lines(file: LogFile, start: int, stop: int, faults: Faults) -> Iterator[list[Line]]:
    """The lines that begin in bytes [start, stop) of a file, about a megabyte of them at a time."""
    try:
        for block in _blocks(file.path, start, stop, faults):
            yield _decode(block, file.path, faults)
    except OSError as error:
        faults.skip("unreadable file", f"{file.path}: {error.strerror}")


def _blocks(path: str, start: int, stop: int, faults: Faults) -> Iterator[bytes]:
    """Whole lines, none longer than MAX_LINE_BYTES, however long the file's lines are."""
    with open(path, "rb") as stream:
        if start:
            stream.seek(start - 1)
            _skip_line(stream)
        while (position := stream.tell()) < stop:
            block = stream.read(min(MAX_LINE_BYTES, stop - position))
            if block.endswith(b"\n"):
                yield block
                continue
            whole = block.rfind(b"\n") + 1
            line = block[whole:] + stream.readline(MAX_LINE_BYTES)
            if len(line) <= MAX_LINE_BYTES:
                yield block[:whole] + line
                continue
            if not line.endswith(b"\n"):
                _skip_line(stream)
            faults.skip("line over 1 MiB", path)
            yield block[:whole]


def _skip_line(stream: BinaryIO) -> None:
    while (piece := stream.readline(MAX_LINE_BYTES)) and not piece.endswith(b"\n"):
        pass


def _decode(block: bytes, path: str, faults: Faults) -> list[Line]:
    try:
        return _decode_lines(block)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raws = [raw for raw in block.split(b"\n") if raw.strip()]
        return [line for raw in raws for line in _decode_one(raw, path, faults)]


def _decode_one(raw: bytes, path: str, faults: Faults) -> list[Line]:
    try:
        return _decode_lines(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        given = json.loads(raw)  # knows NaN and Infinity, which Python programs write
    except (ValueError, RecursionError):
        faults.skip("not JSON (torn line?)", path)
        return []
    return _salvage(given, path, faults)


def _salvage(given: Any, path: str, faults: Faults) -> list[Line]:
    if not isinstance(given, dict):
        faults.skip("not a JSON object", path)
        return []
    extra = given.pop("extra", None)
    if isinstance(extra, dict):
        given["extra"] = _salvage_extra(extra, path, faults)
    elif extra is not None:
        faults.skip("wrong type: extra", path)
        return []
    try:
        return [msgspec.convert(given, Line)]
    except (msgspec.ValidationError, RecursionError) as error:
        faults.skip(_reason(given, str(error)), path)
        return []


def _reason(given: dict, message: str) -> str:
    for key in ("timestamp", "event"):
        if key not in given:
            return f"missing: {key}"
    return f"wrong type: {message.rpartition('$.')[2].strip('`') or 'line'}"


def _salvage_extra(extra: dict, path: str, faults: Faults) -> Extra:
    kept = {}
    for key in EXTRA_KEYS.intersection(extra):
        try:
            kept[key] = msgspec.convert(extra[key], EXTRA_TYPES[key])
        except (msgspec.ValidationError, RecursionError):
            faults.notice(f"wrong type: extra.{key}", path)
    return Extra(**kept)


def to_frame(read: list[tuple[LogFile, list[Line]]], faults: Faults) -> pl.DataFrame:
    """A row an event, files in order: the columns above, with `end` (epoch seconds) for `timestamp`.

    `line` is the row's index among all lines given. Local time is read as UTC, for the format does not say where it was
    local. Where a line is silent, its path speaks. Lines with impossible values are counted and left out.
    """
    files = [file for file, _ in read]
    lines = [line for _, some in read for line in some]
    for line in lines:
        if line.request_id is not None:
            _move_down(line)
    extras = [line.extra or NO_EXTRA for line in lines]
    columns = [_column(name, kind, lines, key) for name, (kind, key) in LINE_COLUMNS.items()]
    columns += [_column(name, kind, extras, key) for name, (kind, key) in EXTRA_COLUMNS.items()]
    columns.append(pl.Series("request_id", _request_ids(extras), pl.String))
    index = pl.Series("file", np.repeat(np.arange(len(files)), [len(some) for _, some in read]), pl.Int64)
    frame = pl.DataFrame(columns).with_columns(
        *(pl.col(name).fill_null(_from_path(name, files, index)) for name in ("worker", "step", "role", "job")),
        _end(columns[0]),
        _tokens(extras),
        index,
        pl.int_range(pl.len()).alias("line"),
    )
    return _drop_impossible(frame.drop("timestamp"), files, faults).drop("file")


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


def _end(stamps: pl.Series) -> pl.Series:
    parsed = stamps.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us", strict=False)
    if parsed.null_count():
        odd = parsed.is_null()
        slow = [_parse(stamp) for stamp in stamps.filter(odd)]
        parsed = parsed.zip_with(~odd, pl.Series(parsed.name, _spread(slow, odd), dtype=pl.Datetime("us")))
    return (parsed.dt.epoch("us") / 1e6).alias("end")


def _spread(values: list, mask: pl.Series) -> list:
    given = iter(values)
    return [next(given) if here else None for here in mask]


def _parse(stamp: str) -> datetime | None:
    """Other ISO 8601 spellings; one with an offset is read as the UTC time it names."""
    try:
        read = datetime.fromisoformat(stamp.strip().replace("Z", "+00:00"))
        return read.astimezone(timezone.utc).replace(tzinfo=None) if read.tzinfo else read
    except (ValueError, OverflowError):
        return None


def parse_time(stamp: str) -> float | None:
    """A time stamp in seconds since the epoch, as `to_frame` reads it; None if it is none."""
    read = _parse(stamp)
    return None if read is None else read.replace(tzinfo=timezone.utc).timestamp()


def _drop_impossible(frame: pl.DataFrame, files: list[LogFile], faults: Faults) -> pl.DataFrame:
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
            faults.skip(reason, files[frame["file"].filter(bad)[0]].path, int(bad.sum()))
            frame = frame.filter(~bad)
    own = frame.filter(~pl.col("event").str.starts_with("log_"))
    back = own.filter(end.diff().over("file") < -BACK_SECONDS)
    if back.height:
        faults.notice("clock went back by more than a second", files[back["file"][0]].path, back.height)
    return frame
