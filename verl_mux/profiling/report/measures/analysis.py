"""What was measured of a run, computed once from its tables. The findings and all outputs read from here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.input import engine_log
from verl_mux.profiling.report.input.reduction import Tables
from verl_mux.profiling.report.input.request_table import make_requests, make_turns
from verl_mux.profiling.report.input.run_log import RunLog
from verl_mux.profiling.report.input.stay_table import make_stays, over_steps
from verl_mux.profiling.report.measures import completion, engines, pace, shares
from verl_mux.profiling.report.measures.leases import Leases, make_leases

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
        return engines.with_unit(requests, self.stays, ["job", "request_id"])

    @cached_property
    def finished(self) -> pl.DataFrame:
        return completion.finished(self.requests)

    @cached_property
    def _turns(self) -> pl.DataFrame:
        return make_turns(self.tables)

    @cached_property
    def turns(self) -> pl.DataFrame:
        """With `unit`, as of requests."""
        return engines.with_unit(self._turns, self.stays, ["job", "request_id", "turn"])

    @cached_property
    def engines(self) -> engines.Engines:
        validating = self.tables.requests.filter("validate").select("job", "request_id").unique()
        return engines.Engines(self.stays, self.spans, validating)

    @cached_property
    def spans(self) -> pl.DataFrame:
        return self.run.tables.spans.sort("start", "end")

    @cached_property
    def step_shares(self) -> pl.DataFrame:
        return shares.step_shares(self.run.tables)

    @cached_property
    def by_step(self) -> pl.DataFrame:
        return completion.completion(self.requests, ["job", "step"])

    @cached_property
    def by_worker(self) -> pl.DataFrame:
        return completion.completion(self.requests, ["job", "step", "worker"])

    @cached_property
    def leases(self) -> Leases:
        return make_leases(self.spans)

    def keys(self, job: str) -> dict[str, str]:
        """What the job's log says of its keys; of its last run, where it says so."""
        told = self.spans.filter((pl.col("job") == job) & (pl.col("event") == events.JOB_KEYS))["keys"].drop_nulls()
        return dict(key.split("=", 1) for key in (told[-1] if told.len() else ()) if "=" in key)

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
    def step_ends(self) -> pace.Ends:
        return pace.step_ends(self.spans)

    @cached_property
    def engine_reports(self) -> pl.DataFrame:
        """The engines' decode counters, from events and from servers' text logs: engine_log.SCHEMA."""
        logged = self.spans.filter(pl.col("event") == events.ENGINE_DECODE).select(*engine_log.SCHEMA)
        return pl.concat([logged, *self.engine_logs])
