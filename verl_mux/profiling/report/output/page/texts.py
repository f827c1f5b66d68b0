"""The texts of requests that the page shows: read again from the files that hold some, for the reduction keeps none."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator

import msgspec
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.input.line_reader import MAX_LINE_BYTES
from verl_mux.profiling.report.input.run_log import RunLog
from verl_mux.profiling.report.output.page.requests import Shown

MAX_BYTES = 4 * 2**20  # in a page
_NAMED = b'"' + events.REQUEST_TEXT.encode() + b'"'


class _Text(msgspec.Struct):
    request_id: str
    prompt: str = ""
    response: str = ""
    left_out: int = 0


class _Line(msgspec.Struct):
    event: str
    extra: _Text
    step: int = 0


def texts(run: RunLog, found: Shown) -> dict[str, tuple[str, str, int]]:
    """Index of a request drawn -> prompt, response, characters left out; MAX_BYTES of them, those most wanted first.

    A sample's name is drawn at random, so that step and name are enough to know it by.
    """
    logged = run.tables.totals.filter(pl.col("event") == events.REQUEST_TEXT)
    if logged.is_empty():
        return {}
    ranked = found.frame.sort("urgent", "seconds", descending=True).select("step", "request_id", "index")
    wanted = {(step, name): (rank, index) for rank, (step, name, index) in enumerate(ranked.iter_rows())}
    return _most_wanted(_written(run, set(logged["step"])), wanted)


def _most_wanted(written: Iterator[_Line], wanted: dict[tuple[int, str], tuple[int, int]]) -> dict[str, tuple[str, str, int]]:
    kept: list[tuple[int, int, tuple[str, str, int]]] = []  # the least wanted stands first
    size = 0
    for line in written:
        place = wanted.pop((line.step, line.extra.request_id), None)
        if place is None:
            continue
        text = (line.extra.prompt, line.extra.response, line.extra.left_out)
        heapq.heappush(kept, (-place[0], place[1], text))
        size += _bytes(text)
        while size > MAX_BYTES and len(kept) > 1:
            size -= _bytes(heapq.heappop(kept)[2])
    return {str(index): text for _, index, text in sorted(kept, key=lambda it: it[1])}


def _bytes(text: tuple[str, str, int]) -> int:
    return len(text[0].encode()) + len(text[1].encode())


def _written(run: RunLog, steps: set[int]) -> Iterator[_Line]:
    """The lines of these steps that hold a text. A file that cannot be read any more has none."""
    decode = msgspec.json.Decoder(_Line).decode
    for file in run.files:
        if file.role != "rollout" or file.step not in steps:
            continue
        with contextlib.suppress(OSError), open(file.path, "rb") as stream:
            while raw := stream.readline(MAX_LINE_BYTES):
                if _NAMED not in raw:
                    continue
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                    line = decode(raw)
                    if line.event == events.REQUEST_TEXT:
                        yield line
