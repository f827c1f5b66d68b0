"""A request's whole life for the page: its stays in engines, tools, reward, and what lay between, in order of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.files import LogFile
from verl_mux.profiling.plain.lines import Line, parse
from verl_mux.profiling.report.measures.analysis import Analysis

Key = tuple[str, int, str]  # job, step, request
LEAST_S = 1e-3  # shorter stretches are not shown
MAX_TEXT = 4_000_000


def lives(analysis: Analysis, named: Mapping[str, Key], origin: float) -> dict[str, list[list[Any]]]:
    """Index of the page's request -> [what, start, end, text] of each stretch; seconds since `origin`. `named`: index -> request.

    Where no stays were logged, a turn's engine call stands for them. A turn's tools begin where its last engine call ended.
    """
    wanted = pl.DataFrame([(i, *key) for i, key in named.items()], ["index", "job", "step", "request_id"], orient="row")
    if wanted.is_empty():
        return {}
    wanted = wanted.with_columns(pl.col("step").cast(pl.Int64))
    found: dict[str, list[list[Any]]] = defaultdict(list)
    for stretch in (*_stays(analysis, wanted), *_turns(analysis, wanted), *_rewards(analysis, wanted)):
        index, what, start, end, text = stretch
        if end - start >= LEAST_S:
            found[index].append([what, round(start - origin, 6), round(end - origin, 6), text])
    return {index: sorted(stretches, key=lambda it: it[1]) for index, stretches in found.items()}


def texts(analysis: Analysis, named: Mapping[str, Key]) -> dict[str, tuple[str, str]]:
    """Index -> prompt and response, of those whose text was logged; of all together at most MAX_TEXT characters.

    The report's tables leave texts out, as they may be most of a log: the files are looked through for them once more.
    """
    logged = analysis.run.tables.totals.filter(pl.col("event") == events.REQUEST_TEXT)
    if logged.is_empty():
        return {}
    wanted = {key: index for index, key in named.items()}
    found: dict[str, tuple[str, str]] = {}
    room = MAX_TEXT
    for file in analysis.run.files:
        for line in _text_lines(file):
            index = wanted.get((line.job, line.step, str(line.extra.get("request_id"))))
            said = tuple(str(line.extra.get(what) or "") for what in ("prompt", "response"))
            if index is not None and sum(map(len, said)) <= room:
                room -= sum(map(len, said))
                found[index] = said[0], said[1]
    return found


def _text_lines(file: LogFile) -> Iterator[Line]:
    mark = events.REQUEST_TEXT.encode()
    try:
        with open(file.path, "rb") as raws:
            yield from (line for raw in raws if mark in raw and (line := parse(raw, file)) is not None)
    except OSError:  # it has gone since it was read
        return


def _stays(analysis: Analysis, wanted: pl.DataFrame) -> list[tuple]:
    """Of all steps of the request, for it may have begun in an earlier one."""
    stays = analysis.stays.join(wanted.select("index", "job", "request_id"), on=["job", "request_id"])
    out = []
    for row in stays.iter_rows(named=True):
        where = f"replica {row['replica']} on {row['node']}" if row["replica"] is not None else "an engine"
        text = f"turn {row['turn'] or 1:g}, stay {row['stay']}: {where}, {row['tokens'] or 0} tokens"
        text += ", cut off" if row["cut"] else ""
        queue = (row["queue"] or 0.0) + (row["held"] or 0.0)
        start = min(row["start"] + queue, row["end"])
        out += [
            (row["index"], "queue", row["start"], start, "queue of " + where),
            (row["index"], "engine", start, row["end"], text),
        ]
    return out


def _turns(analysis: Analysis, wanted: pl.DataFrame) -> list[tuple]:
    key = ["job", "step", "request_id"]
    out = []
    if analysis.stays.is_empty():
        calls = analysis.turns.join(wanted, on=key).filter(pl.col("end").is_not_null())
        for index, turn, seconds, end in calls.select("index", "turn", "engine", "end").iter_rows():
            out.append((index, "engine", end - seconds, end, f"turn {turn}"))
    tools = analysis.tables.turns.join(wanted, on=key).filter((pl.col("tool") > 0) & pl.col("engine_end").is_not_null())
    for index, turn, seconds, end in tools.select("index", "turn", "tool", "engine_end").iter_rows():
        out.append((index, "tool", end, end + seconds, f"tools of turn {turn:g}"))
    return out


def _rewards(analysis: Analysis, wanted: pl.DataFrame) -> list[tuple]:
    scored = analysis.requests.join(wanted, on=["job", "step", "request_id"])
    scored = scored.filter((pl.col("reward") > 0) & pl.col("reward_end").is_not_null())
    return [
        (index, "reward", end - seconds, end, "reward" if score is None else f"reward, score {score:g}")
        for index, end, seconds, score in scored.select("index", "reward_end", "reward", "score").iter_rows()
    ]
