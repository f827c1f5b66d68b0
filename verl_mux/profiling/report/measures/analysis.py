"""What was measured of a run, computed once from its tables: completion, shares, leases, engines. Runs in the report;
called by findings/, output/ and what_if/; pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.step_metrics import QUANTILES
from verl_mux.profiling.report.input.reduction import Tables, make_requests, make_stays, make_turns, over_steps
from verl_mux.profiling.report.input.run_log import ENGINE_SCHEMA, RunLog
from verl_mux.profiling.report.measures.lease_times import Ends, Leases, make_leases, step_ends
from verl_mux.profiling.report.measures.replicas import Engines, with_unit

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


UNAWAITED = 0.1  # of a job's steps


@dataclass(frozen=True)
class Analysis:
    """A run, and what follows from it. Frames are described where they are made."""

    run: RunLog
    engine_logs: tuple[pl.DataFrame, ...] = ()

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
        """The engines' decode counters, from events and from servers' text logs: ENGINE_SCHEMA."""
        logged = self.spans.filter(pl.col("event") == events.ENGINE_DECODE).select(*ENGINE_SCHEMA)
        return pl.concat([logged, *self.engine_logs])
