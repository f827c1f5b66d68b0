"""Read a run's directory: lines become data frames of events, and those the tables of reduction.py.

A line is skipped and counted, by reason, when it is no JSON object, lacks `timestamp` or `event`, has a known top-level key of
the wrong type or an impossible value, or a wrong clock (`mend`). A value of the wrong type inside `extra` is dropped and
counted; the rest of the line is kept. Runs in the report's processes; called by report_command.py; reads files only.
"""

from __future__ import annotations

import bisect
import collections
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from verl_mux.profiling.plain.lines import LogFile, printable
from verl_mux.profiling.report.input.clocks import aligned
from verl_mux.profiling.report.input.reduction import NO_EXTRA, Extra, Line, Tables, marked, reduce_events, told_apart
from verl_mux.profiling.report.input.restarts import sorted_out

MAX_LINE_BYTES = 2**20
PIECE_BYTES = 64 * 2**20  # of the files that one process reduces at a time
PIECE_LINES = 100_000
PARALLEL_BYTES = 256 * 2**20  # below, a second process costs more than it saves
MAX_SECONDS = 1e9  # about 32 years
FAR_SECONDS = 86_400.0  # no step lasts a day: a lone line that far from its file's middle has a wrong clock

_decode_lines = msgspec.json.Decoder(Line).decode_lines
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_EXTRA_TYPES = {field.name: field.type for field in msgspec.structs.fields(Extra)}
_SURROGATE = re.compile("[\ud800-\udfff]")

Restarts = dict[str, list[float]]
Where = Callable[[int], str]  # a row's `line` -> the place that a message names
# column -> (type, attribute of Line or of Extra)
_LINE_COLUMNS: dict[str, tuple[Any, str]] = {
    "timestamp": (pl.String, "timestamp"),
    "event": (pl.String, "event"),
    "seconds": (pl.Float64, "duration_sec"),
    "worker": (pl.Int64, "workid"),
    "step": (pl.Int64, "step"),
    "role": (pl.String, "role"),
    "job": (pl.String, "job"),
    "run": (pl.String, "run"),
}
_EXTRA_COLUMNS: dict[str, tuple[Any, str]] = {
    "turn": (pl.Float64, "turn"),
    "turns": (pl.Int64, "turns"),
    "validate": (pl.Boolean, "validate"),
    "stay": (pl.Int64, "stay"),
    "request_id": (pl.String, "request_name"),
    "tokens": (pl.Float64, "tokens"),
}


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


@dataclass
class RunLog:
    """The tables of a run (see reduction.py), its files, and what was wrong with them."""

    directory: Path
    tables: Tables
    files: list[LogFile] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)


def read_files(
    directory: str | os.PathLike, files: list[LogFile], processes: int = 1, advance: Callable[[int], None] = lambda nbytes: None
) -> RunLog:
    """Read some event logs of a run; no content of theirs makes it raise. `advance` is called with the bytes read.

    With more than one process, call it below `if __name__ == "__main__"`, as multiprocessing asks.
    """
    files, again = sorted_out(files)
    run = RunLog(Path(directory), _tables([], Faults(), {}), files)
    parts = []
    for size, tables, faults in _reduced(_shares(files), processes, again):
        parts.append(tables)
        run.faults.add(faults)
        advance(size)
    if parts:
        run.tables, ahead = aligned(told_apart(Tables.merge(parts)))
        for (job, role, worker), by in sorted(ahead.items()):
            name = {"rollout": "worker", "server": "replica"}[role]
            run.faults.notice(
                f"clock of {name} {worker} {abs(by):.0f} s {'ahead' if by > 0 else 'behind'}: its times were moved",
                job or str(directory),
            )
    return run


def _shares(files: list[LogFile]) -> list[list[LogFile]]:
    """Files together that have about PIECE_BYTES, or one large file."""
    shares: list[list[LogFile]] = []
    room = 0
    for file in files:
        if not shares or room < file.size:
            shares.append([])
            room = PIECE_BYTES
        shares[-1].append(file)
        room -= file.size
    return shares


def _reduced(shares: list[list[LogFile]], processes: int, again: Restarts) -> Iterator[tuple[int, Tables, Faults]]:
    """(bytes read, tables, faults) of each share."""
    sizes = [sum(file.size for file in share) for share in shares]
    if processes < 2 or sum(sizes) < PARALLEL_BYTES:
        yield from ((size, *_reduce(share, again)) for size, share in zip(sizes, shares, strict=True))
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:  # polars does not survive a fork
        for size, (tables, faults) in zip(sizes, pool.map(partial(_reduce, again=again), shares), strict=True):
            yield size, tables, faults


def _reduce(share: list[LogFile], again: Restarts) -> tuple[Tables, Faults]:
    faults = Faults()
    parts: list[Tables] = []
    blocks: list[Block] = []
    for block in (block for file in share for block in _read(file, faults)):
        # A clock is judged by its whole file, unless that is too large.
        may_cut = blocks and (blocks[-1].file != block.file or block.file.size > WHOLE_BYTES)
        if may_cut and sum(len(before.lines) for before in blocks) >= PIECE_LINES:
            parts.append(_tables(blocks, faults, again))
            blocks = []
        blocks.append(block)
    parts.append(_tables(blocks, faults, again))
    return Tables.merge(parts), faults


def _tables(blocks: list[Block], faults: Faults, again: Restarts) -> Tables:
    return reduce_events(_to_frame(blocks, faults, again), [line for block in blocks for line in block.lines])


@dataclass(frozen=True)
class Block:
    """Lines of a file that were read together, and the number of each in the file."""

    file: LogFile
    lines: list[Line]
    numbers: Sequence[int]


def _read(file: LogFile, faults: Faults) -> Iterator[Block]:
    """A file's lines, about a megabyte of them at a time."""
    try:
        for number, raw in _raw_blocks(file.path, faults):
            yield Block(file, *_decode(raw, number, file.path, faults))
    except OSError as error:
        faults.skip("unreadable file", f"{printable(file.path)}: {error.strerror}")


def _raw_blocks(path: str, faults: Faults) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole lines): lines over MAX_LINE_BYTES are passed over without being held in memory."""
    number = 1
    with open(path, "rb") as stream:
        while block := stream.read(MAX_LINE_BYTES):
            enormous = False
            if not block.endswith(b"\n"):
                whole = block.rfind(b"\n") + 1
                line = block[whole:] + stream.readline(MAX_LINE_BYTES)
                enormous = len(line) > MAX_LINE_BYTES
                block = block[:whole] if enormous else block[:whole] + line
                while enormous and not line.endswith(b"\n") and line:
                    line = stream.readline(MAX_LINE_BYTES)
            yield number, block
            number += block.count(b"\n")
            if enormous:
                faults.skip("line over 1 MiB", _where(path, number))
                number += 1


def _where(path: str, number: int) -> str:
    return printable(f"{path}, line {number}")


def _decode(block: bytes, number: int, path: str, faults: Faults) -> tuple[list[Line], Sequence[int]]:
    """A block's lines, the first of which is line `number` of the file, and the number of each; blank ones are no lines."""
    try:
        lines = _decode_lines(block)
        if len(lines) == block.count(b"\n") + (block[-1:] not in (b"", b"\n")):
            return lines, range(number, number + len(lines))
        return lines, [at for at, raw in enumerate(block.split(b"\n"), number) if raw.strip()]
    except _UNREADABLE:
        pass
    kept = [
        (line, at) for at, raw in enumerate(block.split(b"\n"), number) if raw.strip()
        for line in _decode_one(raw, _where(path, at), faults)
    ]  # fmt: skip
    return [line for line, _ in kept], [at for _, at in kept]


def _decode_one(raw: bytes, where: str, faults: Faults) -> list[Line]:
    """One line, without what is wrong in its `extra`; none where the line itself is wrong."""
    try:
        return _decode_lines(raw)
    except _UNREADABLE:
        pass
    try:
        logged = _plain_text(json.loads(raw), where, faults)  # knows NaN and Infinity, which Python programs write
    except (ValueError, RecursionError):
        faults.skip("not JSON (torn line?)", where)
        return []
    if not isinstance(logged, dict):
        faults.skip("not a JSON object", where)
        return []
    extra = {} if (extra := logged.pop("extra", None)) is None else extra
    if not isinstance(extra, dict):
        faults.skip("wrong type: extra", where)
        return []
    kept: dict[str, Any] = {}
    for key in _EXTRA_TYPES.keys() & extra.keys():
        try:
            kept[key] = msgspec.convert(extra[key], _EXTRA_TYPES[key])
        except _UNREADABLE:
            faults.notice(f"wrong type: extra.{key}", where)
    try:
        return [msgspec.convert(logged | {"extra": Extra(**kept)}, Line)]
    except _UNREADABLE as error:
        faults.skip(_reason(logged, str(error)), where)
        return []


def _plain_text(logged: Any, where: str, faults: Faults) -> Any:
    """Half of a surrogate pair is JSON, yet no text that a table or a terminal takes: it is spelled out, as `\\ud800`."""
    text = json.dumps(logged, ensure_ascii=False)
    if not _SURROGATE.search(text):
        return logged
    faults.notice("half a surrogate pair in a text", where)
    return json.loads(_SURROGATE.sub(lambda half: f"\\\\u{ord(half[0]):04x}", text))


def _reason(logged: dict, message: str) -> str:
    for key in ("timestamp", "event"):
        if key not in logged:
            return f"missing: {key}"
    key = message.rpartition("$.")[2].strip("`") or "line"
    negative = type(logged.get(key)) is int and logged[key] < 0
    return f"negative {key}" if negative else f"wrong type: {key}"


def _to_frame(blocks: list[Block], faults: Faults, again: Restarts) -> pl.DataFrame:
    """A row an event, files in order: the columns above, with `end` (epoch seconds) for `timestamp`.

    `line` is the row's index among all lines of the blocks; `job` is marked with its run (`marked`). Local time is read as UTC,
    for the format does not say where it was local. What a line does not say, its path does. Lines with impossible values are
    counted and left out.
    """
    files = list(dict.fromkeys(block.file for block in blocks))
    lines = [line for block in blocks for line in block.lines]
    for line in lines:
        if line.request_id is not None:  # named at the top of the line
            line.extra = line.extra or Extra()
            line.extra.request_id = line.request_id if line.extra.request_id is None else line.extra.request_id
            line.extra.turn = line.turn if line.extra.turn is None else line.extra.turn
    extras = [line.extra or NO_EXTRA for line in lines]
    columns = [
        pl.Series(name, list(map(attrgetter(key), rows)), kind)
        for rows, kinds in ((lines, _LINE_COLUMNS), (extras, _EXTRA_COLUMNS))
        for name, (kind, key) in kinds.items()
    ]
    place = {file: place for place, file in enumerate(files)}
    file_of = np.repeat([place[block.file] for block in blocks], [len(block.lines) for block in blocks]).astype(int)
    numbers = np.concatenate([np.empty(0, int), *(np.asarray(block.numbers, int) for block in blocks)])

    def where(line: int) -> str:
        return _where(files[file_of[line]].path, int(numbers[line]))

    index = pl.Series("file", file_of, pl.Int64)
    of_paths = {
        name: pl.Series([getattr(file, name) for file in files], dtype=_LINE_COLUMNS[name][0]).gather(index)
        for name in ("worker", "step", "role", "job")
    }
    frame = pl.DataFrame(columns).with_columns(
        *(pl.col(name).fill_null(said) for name, said in of_paths.items()),
        _end(columns[0]),
        pl.col("tokens").cast(pl.Int64, strict=False),
        index,
        pl.int_range(pl.len()).alias("line"),
    )
    for job, began in again.items():
        number = sum((pl.col("end") >= time).cast(pl.Int64) for time in began)
        unsaid = (pl.col("job") == job) & pl.col("run").is_null()
        frame = frame.with_columns(pl.when(unsaid).then(pl.lit("#") + number.cast(pl.String)).otherwise("run").alias("run"))
    frame = frame.with_columns(marked("job", "run")).drop("run", "timestamp")
    return mend(_drop_impossible(frame, where, faults), files, where, faults).drop("file")


def _end(stamps: pl.Series) -> pl.Series:
    parsed = stamps.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us", strict=False)
    odd = parsed.is_null().arg_true()
    if len(odd):
        parsed = parsed.scatter(odd, pl.Series(list(map(_parse, stamps.gather(odd))), dtype=pl.Datetime("us")))
    return (parsed.dt.epoch("us") / 1e6).alias("end")


def _parse(stamp: str) -> datetime | None:
    """Other ISO 8601 spellings, of a date with a time of day; in UTC where it names a zone."""
    stamp = stamp.strip()
    try:
        if len(stamp) > len("2025-08-11"):
            read = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
            return read.astimezone(timezone.utc).replace(tzinfo=None) if read.tzinfo else read
    except (ValueError, OverflowError):
        pass
    return None


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


BACK_SECONDS = 1.0  # less is how threads take turns
DISORDER_SECONDS = 5.0  # a line this far from those around it is kept
MAX_JUMPS = 32  # with more, or more than MAX_PART of its lines, a file is not in order of time
MAX_PART = 0.1
MIN_SERIES = 0.5  # of its lines; where the longest series in order of time is shorter, likewise
WHOLE_BYTES = 16 * 2**20  # files up to here are given whole

STRAY = "timestamp out of the order of its file"
BELIEVED = "clock went back by more than a second"

_OWN = ~pl.col("event").str.starts_with("log_")  # the log writes of itself whenever it can


def mend(frame: pl.DataFrame, files: list[LogFile], where: Where, faults: Faults) -> pl.DataFrame:
    """Rows of files in order without lines of a wrong clock, recognised by order: a worker writes its lines as their events end.

    Threads may write slightly out of order, and a log may be ordered by request: a file with many jumps back is in no order of
    time and keeps its times, as do files whose times are compared across files (leases). Of others the longest series in order of
    time is right. `file` is a place in `files`, `line` grows.
    """
    own = frame.filter(_OWN).select("file", "line", "end", "role")
    back = ((pl.col("end").diff() < -BACK_SECONDS) & (pl.col("file").diff() == 0)).fill_null(False)
    stray: list[int] = []
    for file in own.filter(back)["file"].unique().sort():
        rows = own.filter(pl.col("file") == file)
        jumps, lines = rows.filter(back)["line"], rows["line"].to_numpy()
        in_order = len(jumps) <= max(2, min(MAX_JUMPS, MAX_PART * len(lines)))
        judged = in_order and files[file].size <= WHOLE_BYTES and rows["role"][0] == "rollout"
        wrong = _out_of_order(rows["end"].to_numpy()) if judged else np.empty(0, int)
        if len(wrong):
            faults.skip(STRAY, where(lines[wrong[0]]), len(wrong))
            stray += lines[wrong].tolist()
        else:
            faults.notice(BELIEVED, where(jumps[0]), len(jumps))
    return frame.filter(~pl.col("line").is_in(stray)) if stray else frame


def _out_of_order(end: np.ndarray) -> np.ndarray:
    """Places of the times that are off the longest series in order of time, by more than DISORDER_SECONDS."""
    last: list[float] = []  # the least time that ends a series of 1, 2, ... members; `at`: its place
    at: list[int] = []
    before = []
    for place, time in enumerate(end):
        longest = bisect.bisect_right(last, time)
        before.append(at[longest - 1] if longest else -1)
        last[longest : longest + 1], at[longest : longest + 1] = [time], [place]
    series = [at[-1]]
    while before[series[-1]] >= 0:
        series.append(before[series[-1]])
    series.reverse()
    if len(series) < MIN_SERIES * len(end):
        return np.empty(0, int)
    after = np.searchsorted(series, np.arange(len(end)))
    times = np.concatenate([[-np.inf], end[series], [np.inf]])
    return np.flatnonzero((end < times[after] - DISORDER_SECONDS) | (end > times[after + 1] + DISORDER_SECONDS))
