"""What was measured of a run, computed once from its tables: completion, shares, leases, and engines (what requests got of them,
what their schedulers counted). Runs in the report; called by findings/, output/ and what_if/; pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.step_metrics import QUANTILES
from verl_mux.profiling.report.input.reduction import Tables, make_requests, make_stays, make_turns, over_steps
from verl_mux.profiling.report.input.run_log import RunLog
from verl_mux.profiling.report.measures.lease_times import Ends, Leases, make_leases, step_ends

CUT = 1.5  # times the time at which four fifths were done: what runs longer is the tail that a cut would take


def finished(requests: pl.DataFrame) -> pl.DataFrame:
    """Training requests that ran to their end."""
    return requests.filter((pl.col("status") == "complete") & ~pl.col("validate"))


def completion(requests: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """A row per group of `by`: requests, start, total, p50 .. p99 (seconds since its start), t80_over_total; beyond_cut: requests
    that ended later than CUT times t80, and cut_saves: the part of the group's time after that."""
    done = finished(requests)
    start = pl.col("start").min()
    quantiles = {name: _nearest(pl.col("end"), q) - start for name, q in QUANTILES.items()}
    return (
        done.group_by(by)
        .agg(
            pl.len().alias("requests"),
            start=start,
            total=pl.col("end").max() - start,
            **quantiles,
            beyond_cut=(pl.col("end") - start > CUT * quantiles["p80"]).sum(),
        )
        .with_columns(
            t80_over_total=pl.when(pl.col("total") > 0).then(pl.col("p80") / pl.col("total")).otherwise(1.0),
            cut_saves=pl.when(pl.col("total") > 0).then((1 - CUT * pl.col("p80") / pl.col("total")).clip(0.0)).otherwise(0.0),
        )
        .sort(by)
    )


def _nearest(values: pl.Expr, q: float) -> pl.Expr:
    rank = (q * values.len()).ceil().cast(pl.Int64) - 1
    return values.sort().get(rank.clip(0))


WHOLE = {"rollout": events.TOTAL_STEP, "trainer": events.STEP}
_STEP_KEY = ["job", "role", "step"]


def step_shares(tables: Tables) -> pl.DataFrame:
    """A row per job, role, step and event: `seconds` (mean of a worker) and `share` (0 to 1 of the step)."""
    parts = _step_level(tables)
    workers = parts.group_by(_STEP_KEY).agg(pl.col("worker").n_unique().alias("workers"), _whole().alias("whole"))
    inside = parts.filter(~pl.col("event").is_in(list(events.ENCLOSING)))
    return (
        inside.group_by(*_STEP_KEY, "event")
        .agg(pl.col("seconds").sum())
        .join(workers, on=_STEP_KEY)
        .filter(pl.col("whole") > 0)
        .with_columns(pl.col("seconds") / pl.col("workers"), share=pl.col("seconds") / pl.col("whole"))
        .select(*_STEP_KEY, "event", "seconds", "share")
        .sort(*_STEP_KEY, "event")
    )


def event_share(tables: Tables) -> dict[str, float]:
    """Percent of the step by event, largest first: the mean over the steps of all jobs."""
    steps = step_shares(tables)
    counts = steps.select(_STEP_KEY).unique().group_by("role").len("steps")
    means = steps.group_by("role", "event").agg(pl.col("share").sum()).join(counts, on="role")
    means = means.with_columns(percent=100 * pl.col("share") / pl.col("steps")).sort("role")  # rollout before trainer
    found = dict(means.select("event", "percent").iter_rows())
    return dict(sorted(((event, round(percent, 4)) for event, percent in found.items()), key=lambda item: (-item[1], item[0])))


def _step_level(tables: Tables) -> pl.DataFrame:
    """What is logged of steps, requests' events aside. Of a trainer that logs whole steps, only those: init is no step."""
    of_request = pl.col("of_request") | pl.col("event").is_in(list(events.OF_REQUESTS))
    timed = (pl.col("count") > 0) & pl.col("longest").is_not_null() & ~of_request
    whole = (pl.col("event") == events.STEP).any()
    real = (pl.col("role") != "trainer") | whole.over(_STEP_KEY) | ~whole.over("job", "role")
    return tables.totals.filter(timed & pl.col("role").is_in(list(WHOLE))).filter(real)


def _whole() -> pl.Expr:
    """Seconds of the step over all workers: each worker's own total, or the sum of its parts."""
    is_whole = pl.col("event").is_in(list(WHOLE.values()))
    has_whole = pl.col("worker").is_in(pl.col("worker").filter(is_whole).implode())
    known = pl.col("event").is_in(list(events.NAMES))
    part = ~pl.col("event").is_in(list(events.ENCLOSING)) & (known | ~known.any())
    inside = part & ~has_whole
    return pl.col("seconds").filter(is_whole).sum() + pl.col("seconds").filter(inside).sum()


UNIT = ["job", "step", "unit"]
Place = tuple[str, int, int]  # job, step, replica
MIN_TOKENS = 4  # of a stay, to measure its engine's pace
MIN_LET_IN = 8  # stays, to measure a queue


def busy() -> pl.Expr:
    """Seconds that the rows of a group cover together: in order of their `start`, each adds what those before it leave."""
    start, end = (pl.col(name).sort_by("start") for name in ("start", "end"))
    return (end - pl.max_horizontal(start, end.cum_max().shift())).clip(0.0).sum().alias("busy")


def with_unit(frame: pl.DataFrame, stays: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """`frame` with the columns `replica`, of the longest stay of each `key`, and `unit`: that, else `worker`."""
    known = stays.filter(pl.col("replica").is_not_null())
    known = known.with_columns(pl.col("turn").cast(frame.schema["turn"])) if "turn" in key else known
    longest = known.sort("seconds").group_by(key).agg(pl.col("replica").last())
    return frame.join(longest, on=key, how="left", maintain_order="left").with_columns(
        pl.coalesce("replica", "worker").alias("unit")
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


NORMAL = 1.4826  # a normal's standard deviation over its median absolute deviation


def log_spread(values: Sequence[float] | np.ndarray) -> float:
    """Of positive values' logarithms, as a standard deviation that a few far values do not move."""
    logs = np.log(np.maximum(values, 1e-9))
    return NORMAL * float(np.median(np.abs(logs - np.median(logs))))


def log_spread_of(values: pl.Expr) -> pl.Expr:
    """The same of a group's values."""
    logs = values.log()
    return (NORMAL * (logs - logs.median()).abs().median()).alias("spread")


UNAWAITED = 0.1  # of a job's steps


@dataclass(frozen=True)
class Analysis:
    """A run, and what follows from it. Frames are described where they are made."""

    run: RunLog

    @cached_property
    def tables(self) -> Tables:
        """As read, each request in one step."""
        return over_steps(self.run.tables)

    @cached_property
    def stays(self) -> pl.DataFrame:
        return make_stays(self.tables)

    @cached_property
    def requests(self) -> pl.DataFrame:
        """With `unit`: the replica where it was longest, in jobs whose log says that; else its worker."""
        requests = make_requests(self.tables, self._turns)
        return with_unit(requests, self.stays, ["job", "request_id"])

    @cached_property
    def finished(self) -> pl.DataFrame:
        return finished(self.requests)

    @cached_property
    def _turns(self) -> pl.DataFrame:
        return make_turns(self.tables)

    @cached_property
    def turns(self) -> pl.DataFrame:
        """With `unit`, as of requests."""
        return with_unit(self._turns, self.stays, ["job", "request_id", "turn"])

    @cached_property
    def worked(self) -> pl.DataFrame:
        """What engines worked at, by UNIT: request_id, part (stay or turn), start, end, work (seconds), tokens, pace (seconds a
        token), held. Stays in engines; of jobs that name none, the turns of each worker; without those, whole requests where none
        was cut off (but of no job whose steps do not wait for them). Where a job logs no tokens, each counts as one.
        """
        columns = [*UNIT, "request_id", "part", "start", "end", "work", "tokens", "pace", "held"]
        engines, requests = self.engines, self.requests
        unnamed = ~pl.col("job").is_in([*engines.jobs, *self.unawaited])
        turns = self.turns.filter(unnamed & (pl.col("engine") > 0))
        turns = turns.with_columns(start=pl.col("end") - pl.col("engine"), work="engine", part="turn")
        cut = pl.any_horizontal(pl.col("status") == "aborted", pl.col("parked") > 0).any().over("job")
        without_turns = ~cut & unnamed & ~pl.col("job").is_in(list(set(turns["job"])))
        whole = finished(requests.filter(without_turns)).with_columns(
            work=pl.col("seconds") - pl.sum_horizontal("tool", "reward"), part=1
        )
        rows = [engines.stays.with_columns(part="stay"), *(frame.with_columns(held=0.0) for frame in (turns, whole))]
        counts = (pl.col("tokens") > 0).any().over("job")
        tokens = pl.when(counts).then("tokens").otherwise(1)
        pace = pl.when((tokens >= MIN_TOKENS) | ~counts).then(pl.col("work") / tokens)
        rows = [frame.with_columns(tokens=tokens, pace=pace).select(columns) for frame in rows]
        return pl.concat(rows, how="vertical_relaxed").filter(pl.col("tokens") > 0)

    @cached_property
    def engines(self) -> Engines:
        validating = self.tables.requests.filter("validate").select("job", "request_id").unique()
        return Engines(self.stays, self.spans, validating)

    @cached_property
    def spans(self) -> pl.DataFrame:
        return self.run.tables.spans.sort("start", "end")

    @cached_property
    def step_shares(self) -> pl.DataFrame:
        return step_shares(self.run.tables)

    @cached_property
    def by_step(self) -> pl.DataFrame:
        return completion(self.requests, ["job", "step"])

    @cached_property
    def by_worker(self) -> pl.DataFrame:
        return completion(self.requests, ["job", "step", "worker"])

    @cached_property
    def leases(self) -> Leases:
        return make_leases(self.spans)

    def keys(self, job: str) -> dict[str, str]:
        """What the job's log says of its keys; of its last run, where it says so."""
        logged = self.spans.filter((pl.col("job") == job) & (pl.col("event") == events.JOB_KEYS))["keys"].drop_nulls()
        return dict(key.split("=", 1) for key in (logged[-1] if logged.len() else ()) if "=" in key)

    @cached_property
    def unawaited(self) -> set[str]:
        """Jobs whose steps, a tenth of them or more, end while requests of theirs go on: nothing waits for a step's last request,
        and what holds requests up may be the trainer, which has taken the engines' device."""
        last = self.finished.group_by("job", "step").agg(pl.col("end").max().alias("last"))
        steps = self.spans.filter((pl.col("event") == events.STEP) & (pl.col("role") == "trainer"))
        both = steps.select("job", "step", "end").join(last, on=["job", "step"])
        late = both.group_by("job").agg((pl.col("last") > pl.col("end")).mean().alias("part"))
        return set(late.filter(pl.col("part") >= UNAWAITED)["job"])

    @cached_property
    def step_ends(self) -> Ends:
        return step_ends(self.spans)

    @cached_property
    def engine_reports(self) -> pl.DataFrame:
        """The engines' decode counters, by whichever role logged them."""
        return self.spans.filter(pl.col("event") == events.ENGINE_DECODE)
