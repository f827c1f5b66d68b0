"""What the page draws of requests: packed columns (base64 of little-endian arrays), whole lives, and texts.

A run of more than MAX_REQUESTS is thinned: every n-th request of each step and replica (worker), counted back from the one that
ended last, so that curves of completion keep their form and end; the slowest and those that findings name stay. Each request
drawn has its life (stays in engines, tools, rewards), up to MAX_STRETCHES in all; texts are read again from the log's files.
Runs on the command line; called by page.py; reads files.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Line, parse
from verl_mux.profiling.report.input.reduction import SHOWN_PARTS
from verl_mux.profiling.report.input.run_log import RunLog
from verl_mux.profiling.report.measures.analysis import Analysis

MAX_REQUESTS = 200_000
SLOWEST = 2_000  # that are drawn in any case
NO_LANE = 0xFFFF
# The parts the page colours, and which of ours they hold.
GROUPS = {"engine": ["engine"], "tool": ["tool", "tool_response", "interaction"], "reward": ["reward"]}


@dataclass(frozen=True)
class Shown:
    """frame: the requests drawn, `index` is their row; `urgent`: asked for by a finding or among the slowest. of: how many there
    are in all. each: one of how many is drawn. workers, replicas: the lanes, (job, worker) and (job, replica, node)."""

    frame: pl.DataFrame
    of: int
    each: int
    workers: list[tuple]
    replicas: list[tuple]


def shown(analysis: Analysis, summary: dict[str, Any]) -> Shown:
    every = analysis.requests.filter(~pl.col("validate"))
    found = {finding["request_id"] for finding in summary["findings"]} - {None}
    slowest = pl.col("seconds").rank("ordinal", descending=True) <= SLOWEST
    every = every.with_columns((pl.col("request_id").is_in(list(found)) * 2 + slowest).alias("urgent"))
    each = -(-every.height // MAX_REQUESTS)
    frame = every if each <= 1 else _thinned(every, each)
    workers = frame.select("job", "worker").unique().sort("job", "worker")
    replicas = frame.select("job", "replica").drop_nulls().unique().sort("job", "replica")
    frame = (
        frame.join(workers.with_row_index("worker_lane"), on=["job", "worker"])
        .join(replicas.with_row_index("replica_lane"), on=["job", "replica"], how="left")
        .sort("start", "end", "request_id")
        .with_row_index("index")
    )
    on = analysis.engines.node_of
    return Shown(frame, every.height, max(each, 1), workers.rows(), [(*key, on.get(key)) for key in replicas.rows()])


def _thinned(every: pl.DataFrame, each: int) -> pl.DataFrame:
    place = pl.int_range(pl.len()).over("job", "step", "unit")
    return every.sort("end", descending=True).filter((place % each == 0) | (pl.col("urgent") > 0))


def columns(found: Shown, origin: float) -> dict[str, str]:
    """Packed; the page's base.js knows their types. Times: seconds since `origin`."""
    frame = found.frame
    packed = {
        "worker": pack(frame["worker_lane"], "<u2"),
        "replica": pack(frame["replica_lane"].fill_null(NO_LANE), "<u2"),
        "step": pack(frame["step"].clip(0, None), "<u4"),
        "start": pack(frame["start"] - origin, "<f4"),
        "end": pack(frame["end"] - origin, "<f4"),
        "tokens": pack(frame["tokens"].fill_null(0), "<u4"),
        "turns": pack(frame["turns"].fill_null(0).clip(0, 255), "<u1"),
        "done": pack(frame["status"] == "complete", "<u1"),
    }
    grouped = {part for parts in GROUPS.values() for part in parts}
    for name, parts in (GROUPS | {"other": [part for part in SHOWN_PARTS if part not in grouped]}).items():
        packed[name] = pack(frame.select(pl.sum_horizontal(parts)).to_series(), "<f4")
    return packed


def pack(values: pl.Series, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values.to_numpy()).astype(kind).tobytes()).decode()


MAX_STRETCHES = 600_000
LEAST_S = 1e-3  # shorter stretches are not shown
WHAT = {"queue": 0, "engine": 1, "engine, cut off": 2, "tool": 3, "reward": 4}
_COLUMNS = {"turn": pl.Float64, "stay": pl.Int64, "replica_lane": pl.UInt32, "value": pl.Float64}


def lives(analysis: Analysis, found: Shown) -> dict[str, Any]:
    """`names` of the requests kept, `kept` and `counts` (of their stretches) a row a request drawn, and the stretches in order of
    request and start: what (WHAT), at (seconds since the request's start), took, turn, stay, replica (lane), value (tokens of a
    stay, score of a reward; NaN if unknown). Where no stays were logged, a turn's engine call stands for them."""
    frame = found.frame
    parts = [*_stay_stretches(analysis, found), *_turn_stretches(analysis, frame), _rewards(frame, analysis)]
    every = pl.concat([_stretches(part) for part in parts]).filter(pl.col("took") >= LEAST_S)
    every = every.join(_kept(frame, every), on="index", how="semi").sort("index", "at", "what")
    counts = every.group_by("index").len("count")
    kept = _kept(frame, every)
    table = frame.select("index").join(counts, on="index", how="left").join(kept, on="index", how="left").sort("index")
    return {
        "names": frame.filter(pl.lit(table["kept"].fill_null(False)))["request_id"].to_list(),
        "kept": pack(table["kept"].fill_null(False), "<u1"),
        "counts": pack(table["count"].fill_null(0), "<u2"),
        "what": pack(every["what"], "<u1"),
        "at": pack(every["at"], "<f4"),
        "took": pack(every["took"], "<f4"),
        "turn": pack(every["turn"].fill_null(0).clip(0, 255), "<u1"),
        "stay": pack(every["stay"].fill_null(0).clip(0, 2**16 - 1), "<u2"),
        "replica": pack(every["replica_lane"].fill_null(NO_LANE), "<u2"),
        "value": pack(every["value"].fill_null(float("nan")), "<f4"),
    }


def _kept(frame: pl.DataFrame, stretches: pl.DataFrame) -> pl.DataFrame:
    """`index` and `kept` of the requests whose stretches fit, the most wanted first."""
    size = stretches.group_by("index").len("size")
    ranked = frame.join(size, on="index", how="left").sort("urgent", "seconds", descending=True)
    fits = pl.col("size").fill_null(1).cast(pl.Int64).cum_sum() <= MAX_STRETCHES
    return ranked.filter(fits).select("index", pl.lit(True).alias("kept"))


def _stretches(part: pl.DataFrame) -> pl.DataFrame:
    """`index`, `what`, `at`, `took` and _COLUMNS; `part` has times as `from`, `to` and `start` of its request."""
    missing = [pl.lit(None, kind).alias(name) for name, kind in _COLUMNS.items() if name not in part.columns]
    return part.with_columns(*missing).select(
        pl.col("index").cast(pl.UInt32),
        pl.col("what").cast(pl.Int32),
        (pl.col("from") - pl.col("start")).alias("at"),
        (pl.col("to") - pl.col("from")).alias("took"),
        *(pl.col(name).cast(kind) for name, kind in _COLUMNS.items()),
    )


def _stay_stretches(analysis: Analysis, found: Shown) -> list[pl.DataFrame]:
    """Of all steps of the request, for it may have begun in an earlier one."""
    own = found.frame.select("index", "job", "request_id", pl.col("start").alias("began"))
    stays = analysis.stays.join(own, on=["job", "request_id"])
    lanes = pl.DataFrame(
        [(job, replica, lane) for lane, (job, replica, _) in enumerate(found.replicas)],
        {"job": pl.String, "replica": pl.Int64, "replica_lane": pl.UInt32},
        orient="row",
    )
    stays = stays.join(lanes, on=["job", "replica"], how="left")
    waited = pl.col("queue").fill_null(0.0) + pl.col("held").fill_null(0.0)
    let_in = pl.min_horizontal(pl.col("start") + waited, "end")
    engine = pl.when("cut").then(WHAT["engine, cut off"]).otherwise(WHAT["engine"])
    start = pl.col("began").alias("start")
    return [
        stays.with_columns(start, **{"what": pl.lit(WHAT["queue"]), "from": "start", "to": let_in}),
        stays.with_columns(start, **{"what": engine, "from": let_in, "to": "end", "value": "tokens"}),
    ]


def _turn_stretches(analysis: Analysis, frame: pl.DataFrame) -> list[pl.DataFrame]:
    """A turn's tools begin where its last engine call ended."""
    key = ["job", "step", "request_id"]
    own = frame.select("index", *key, "start")
    out = []
    if analysis.stays.is_empty():
        calls = analysis.turns.join(own, on=key).filter(pl.col("end").is_not_null())
        times = {"from": pl.col("end") - pl.col("engine"), "to": "end"}
        out.append(calls.with_columns(what=WHAT["engine"], value="tokens", **times))
    tools = analysis.tables.turns.join(own, on=key).filter((pl.col("tool") > 0) & pl.col("engine_end").is_not_null())
    times = {"from": "engine_end", "to": pl.col("engine_end") + pl.col("tool")}
    return [*out, tools.with_columns(what=WHAT["tool"], **times)]


def _rewards(frame: pl.DataFrame, analysis: Analysis) -> pl.DataFrame:
    scored = frame.filter((pl.col("reward") > 0) & pl.col("reward_end").is_not_null())
    times = {"from": pl.col("reward_end") - pl.col("reward"), "to": "reward_end"}
    return scored.with_columns(what=WHAT["reward"], value="score", **times)


MAX_TEXT_BYTES = 4 * 2**20  # in a page
_NAMED = b'"' + events.REQUEST_TEXT.encode() + b'"'
_TEXT: dict[str, Any] = {"prompt": "", "response": "", "left_out": 0}


def texts(run: RunLog, found: Shown) -> dict[str, tuple[str, str, int]]:
    """Index of a request drawn -> prompt, response, characters left out; MAX_TEXT_BYTES of them, those most wanted first.

    A sample's name is drawn at random, so that step and name are enough to know it by.
    """
    logged = run.tables.totals.filter(pl.col("event") == events.REQUEST_TEXT)
    if logged.is_empty():
        return {}
    ranked = found.frame.sort("urgent", "seconds", descending=True).select("step", "request_id", "index")
    wanted = {(step, name): (rank, index) for rank, (step, name, index) in enumerate(ranked.iter_rows())}
    kept: list[tuple[int, int, tuple[str, str, int]]] = []  # the least wanted stands first
    size = 0
    for line in _written(run, set(logged["step"])):
        place = wanted.pop((line.step, str(line.extra.get("request_id"))), None)
        prompt, response, left_out = (line.extra.get(key, default) for key, default in _TEXT.items())
        if place is None or not isinstance(prompt, str) or not isinstance(response, str):
            continue
        text = (prompt, response, left_out)
        heapq.heappush(kept, (-place[0], place[1], text))
        size += _bytes(text)
        while size > MAX_TEXT_BYTES and len(kept) > 1:
            size -= _bytes(heapq.heappop(kept)[2])
    return {str(index): text for _, index, text in sorted(kept, key=lambda it: it[1])}


def _bytes(text: tuple[str, str, int]) -> int:
    return len(text[0].encode()) + len(text[1].encode())


def _written(run: RunLog, steps: set[int]) -> Iterator[Line]:
    """The lines of these steps that hold a text. A file that cannot be read any more has none."""
    for file in run.files:
        if file.role == "rollout" and file.step in steps:
            with contextlib.suppress(OSError), open(file.path, "rb") as raws:
                lines = (parse(raw, file) for raw in raws if _NAMED in raw)
                yield from (line for line in lines if line is not None and line.event == events.REQUEST_TEXT)
