"""Replicas and nodes: what their requests got, and what their schedulers counted. Runs in the report;
called by analysis.py, findings/ and what_if/; pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events

UNIT = ["job", "step", "unit"]
Place = tuple[str, int, int]  # job, step, replica
MIN_TOKENS = 4  # of a stay, to measure its engine's pace
MIN_LET_IN = 8  # stays, to measure a queue


def busy() -> pl.Expr:
    """Seconds that the rows of a group cover together: in order of their `start`, each adds what those before it leave."""
    start, end = (pl.col(name).sort_by("start") for name in ("start", "end"))
    return (end - pl.max_horizontal(start, end.cum_max().shift())).clip(0.0).sum().alias("busy")


def with_unit(frame: pl.DataFrame, stays: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """`frame` with the column `unit`: the replica of the longest stay of each `key`; `worker` where no stay says it."""
    known = stays.filter(pl.col("replica").is_not_null())
    if known.is_empty():
        return frame.with_columns(pl.col("worker").alias("unit"))
    known = known.with_columns(pl.col("turn").cast(frame.schema["turn"])) if "turn" in key else known
    longest = known.sort("seconds").group_by(key).agg(pl.col("replica").last().alias("unit"))
    return frame.join(longest, on=key, how="left", maintain_order="left").with_columns(
        pl.coalesce("unit", "worker").alias("unit")
    )


@dataclass(frozen=True)
class Engines:
    """The engines of a run, from their stays (`make_stays`) and their counters. Empty where the log names no engine.

    validating: `job` and `request_id` of the requests that did not train.
    """

    all_stays: pl.DataFrame
    spans: pl.DataFrame
    validating: pl.DataFrame

    @cached_property
    def known(self) -> pl.DataFrame:
        """Stays on a known replica, with `work` (seconds that the engine worked at it) and `pace` (seconds a token)."""
        known = self.all_stays.filter(pl.col("replica").is_not_null())
        work = (pl.col("seconds") - pl.col("held").fill_null(0.0) - pl.col("queue").fill_null(0.0)).clip(0.0)
        known = known.with_columns(work.alias("work"))
        enough = pl.when(pl.col("tokens") >= MIN_TOKENS)
        return known.with_columns(enough.then(pl.col("work") / pl.col("tokens")).alias("pace"), pl.col("replica").alias("unit"))

    @cached_property
    def stays(self) -> pl.DataFrame:
        """Of these, those of requests that trained: a validation has the step of the training before it, and its own time."""
        return self.known.join(self.validating, on=["job", "request_id"], how="anti", maintain_order="left")

    @cached_property
    def validation(self) -> pl.DataFrame:
        """The others."""
        return self.known.join(self.validating, on=["job", "request_id"], how="semi", maintain_order="left")

    @cached_property
    def jobs(self) -> set[str]:
        """Jobs whose log names engines."""
        return set(self.known["job"])

    @cached_property
    def node_of(self) -> dict[tuple[str, int], str]:
        """(job, replica) -> node."""
        parts = [self.known.select("job", "replica", "node"), self.counters.select("job", "replica", "node")]
        rows = pl.concat(parts).drop_nulls().unique(["job", "replica"], keep="last").rows()
        return {(job, replica): node for job, replica, node in rows}

    @cached_property
    def counters(self) -> pl.DataFrame:
        """Their schedulers' counters, a row a line, in order of time."""
        logged = self.spans.filter((pl.col("event") == events.ENGINE_DECODE) & (pl.col("role") == "server"))
        return logged.with_columns(pl.coalesce("replica", "worker").alias("replica")).sort("end")

    def stacks(self, job: str, replica: int, start: float, end: float) -> str | None:
        """Where the stacks of a replica's processes were written that were taken between these times."""
        of = (pl.col("event") == events.ENGINE_STALLED) & (pl.col("job") == job) & (pl.col("replica") == replica)
        found = self.spans.filter(of & pl.col("end").is_between(start, end))["path"].drop_nulls()
        return found[0] if len(found) else None

    @cached_property
    def steps(self) -> dict[tuple[str, int], tuple[float, float]]:
        """(job, step) -> when its stays began and ended."""
        return times_of_steps(self.stays)

    def by_place(self, places: Collection[Place]) -> dict[Place, pl.DataFrame]:
        """The stays of each of these places, where there are any."""
        keys = ["job", "step", "replica"]
        wanted = pl.DataFrame(list(places), {key: self.stays.schema[key] for key in keys}, orient="row")
        return by_place(self.stays.join(wanted, on=keys, how="semi", maintain_order="left"))

    @cached_property
    def queue_parts(self) -> dict[Place, float]:
        """Part of the time of a replica's stays in a step, 0 to 1, that went by in its queue; of MIN_LET_IN stays or more that
        were let in."""
        let_in = was_let_in(self.stays).group_by("job", "step", "replica", maintain_order=True)
        held, queue = pl.col("held").fill_null(0.0), pl.col("queue").sum()
        parts = let_in.agg(pl.len().alias("n"), (pl.col("seconds") - held).sum().alias("whole"), queue)
        enough = parts.filter((pl.col("n") >= MIN_LET_IN) & (pl.col("whole") > 0))
        return {(job, step, replica): queue / whole for job, step, replica, _, whole, queue in enough.rows()}

    def where(self, job: str, replica: int | None) -> dict[str, Any]:
        """`replica` and `node` for a finding; none where the job's log knows no engines."""
        if job not in self.jobs or replica is None:
            return {}
        return {"replica": replica, "node": self.node_of.get((job, replica))}

    def figures(self, by: str) -> list[dict[str, Any]]:
        """A row a job and `by` ("replica" or "node"), in order."""
        counters = self.counters.group_by("job", by).agg(
            pl.len().alias("reports"), pl.col("token_usage").max(), pl.col("queued").max(), pl.col("running").max(),
            pl.col("tokens_per_sec").median().alias("reported_tokens_per_sec"),
        )  # fmt: skip
        by_engine = {(job, unit): row for job, unit, *row in counters.rows()}
        keys = [name for name in counters.columns if name not in ("job", by)]
        rows = []
        for (job, unit), stays in sorted(self.known.group_by("job", by), key=lambda item: (item[0][0], str(item[0][1]).zfill(9))):
            extra = dict(zip(keys, by_engine.get((job, unit), [None] * len(keys)), strict=True))
            rows.append({"job": job, by: unit, **_figures(stays, by), **extra})
        return rows


def _figures(stays: pl.DataFrame, by: str) -> dict[str, Any]:
    used = float(stays.select(busy()).item())
    seconds, queue = float(stays["seconds"].sum()), float(stays["queue"].fill_null(0.0).sum())
    tokens = int(stays["tokens"].fill_null(0).sum())
    other = "node" if by == "replica" else "replica"
    return {
        f"{other}s": sorted(stays[other].drop_nulls().unique().to_list()),
        "stays": stays.height,
        "cut": int(stays["cut"].fill_null(False).sum()),
        "requests": stays["request_id"].n_unique(),
        "tokens": tokens,
        "tokens_per_sec": round(tokens / used, 3) if used > 0 else None,
        "seconds_per_token": None if (pace := stays["pace"].median()) is None else round(float(pace), 6),
        "queue_part": round(queue / seconds, 4) if seconds > 0 else 0.0,
        "retractions": int(stays["retractions"].fill_null(0).sum()),
    }


def by_place(stays: pl.DataFrame) -> dict[Place, pl.DataFrame]:
    return dict(stays.group_by("job", "step", "replica", maintain_order=True))


def times_of_steps(stays: pl.DataFrame) -> dict[tuple[str, int], tuple[float, float]]:
    """(job, step) -> when these stays began and ended."""
    found = stays.group_by("job", "step").agg(pl.col("start").min(), pl.col("end").max())
    return {(job, step): (start, end) for job, step, start, end in found.rows()}


def was_let_in(stays: pl.DataFrame) -> pl.DataFrame:
    """Those that did not leave from the queue."""
    return stays.filter((pl.col("tokens") > 0) & pl.col("queue").is_not_null())


def middle(values: list[float]) -> float:
    return float(np.median(values))
