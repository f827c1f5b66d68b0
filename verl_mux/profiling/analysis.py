"""Everything the report says about a run, computed once from its tables. The findings and all outputs read from here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from verl_mux.profiling import completion, engine_log, events, find_gaps, find_requests, pace, shares
from verl_mux.profiling.finding import Finding
from verl_mux.profiling.leases import Leases, make_leases
from verl_mux.profiling.requests import make_requests, make_turns
from verl_mux.profiling.run_log import RunLog
from verl_mux.profiling.silent_gaps import Gap


@dataclass(frozen=True)
class Analysis:
    """A run, and what follows from it. Frames are described where they are made."""

    run: RunLog
    engine_logs: tuple[pl.DataFrame, ...] = ()

    @cached_property
    def requests(self) -> pl.DataFrame:
        return make_requests(self.run.tables, self.turns)

    @cached_property
    def finished(self) -> pl.DataFrame:
        return completion.finished(self.requests)

    @cached_property
    def turns(self) -> pl.DataFrame:
        return make_turns(self.run.tables)

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

    @cached_property
    def gaps(self) -> dict[find_gaps.Place, Gap]:
        return find_gaps.gaps_of(self)

    @cached_property
    def abnormal(self) -> list[Finding]:
        return find_requests.find(self)

    @cached_property
    def ordinary(self) -> pl.DataFrame:
        """`finished` without abnormal requests, and with the gaps cut out of time: what remains to be judged as a whole."""
        slow = [(f.job, f.step, f.worker, f.request_id) for f in self.abnormal]
        key = ["job", "step", "worker", "request_id"]
        schema = {name: self.finished.schema[name] for name in key}
        rest = self.finished.join(pl.DataFrame(slow, schema, orient="row"), on=key, how="anti", maintain_order="left")
        for (job, step, worker), gap in self.gaps.items():
            here = (pl.col("job") == job) & (pl.col("step") == step) & (pl.col("worker") == worker)
            after = here & (pl.col("end") >= gap.end)
            rest = rest.with_columns(pl.when(after).then(pl.col("end") - gap.seconds).otherwise("end").alias("end"))
        return rest
