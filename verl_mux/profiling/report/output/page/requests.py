"""The requests that the page draws, as packed columns: base64 of little-endian arrays, a row a request, in order of its start.

A run of more than MAX_REQUESTS is thinned: every n-th request of each step and replica (worker), counted back from the one that
ended last, so that curves of completion keep their form and their end; and those that people look for, the slowest and what
findings name.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from verl_mux.profiling.report.input.request_table import SHOWN_PARTS
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
    every = _with_replica(analysis, analysis.requests.filter(~pl.col("validate")))
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


def _with_replica(analysis: Analysis, requests: pl.DataFrame) -> pl.DataFrame:
    """`replica`: where a request was longest; null where its job's log knows none, or it was in none."""
    placed = pl.col("job").is_in(list(analysis.engines.jobs)) & (pl.col("stays") > 0)
    return requests.with_columns(pl.when(placed).then("unit").alias("replica"))


def _thinned(every: pl.DataFrame, each: int) -> pl.DataFrame:
    place = pl.int_range(pl.len()).over("job", "step", "unit")
    ranked = every.sort("end", descending=True).with_columns(place.alias("place"))
    return ranked.filter((pl.col("place") % each == 0) | (pl.col("urgent") > 0)).drop("place")


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
