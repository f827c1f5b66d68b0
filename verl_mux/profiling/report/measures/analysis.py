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
        return engines.Engines(self.stays, self.spans)

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

    @cached_property
    def step_ends(self) -> pace.Ends:
        return pace.step_ends(self.spans)

    @cached_property
    def engine_reports(self) -> pl.DataFrame:
        """The engines' decode counters, from events and from servers' text logs: engine_log.SCHEMA."""
        logged = self.spans.filter(pl.col("event") == events.ENGINE_DECODE).select(*engine_log.SCHEMA)
        return pl.concat([logged, *self.engine_logs])
