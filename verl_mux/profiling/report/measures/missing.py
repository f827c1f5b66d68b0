"""What a log does not say, which event or field would say it, and what follows from that. A new entry is one line in ASKED.
Runs in the report; called by output/summary.py; pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.measures.analysis import Analysis


class _Job:
    """What a job's log has."""

    def __init__(self, analysis: Analysis, job: str) -> None:
        of_job = pl.col("job") == job
        self.has = set(analysis.run.tables.totals.filter(of_job)["event"])
        self.requests = analysis.requests.filter(of_job)
        self.stays = analysis.engines.known.filter(of_job)
        self.shared = any(hold.job != job for hold in analysis.leases.holds)

    def lacks(self, *names: str) -> bool:
        return not self.has & set(names)

    @property
    def carried(self) -> bool:
        return not self.lacks(events.REQUEST_REQUEUED) or bool((self.requests["parked"] > 0).any())


# what is not known, the event or field that would say it, what follows, and when that is so
ASKED: list[tuple[str, str, str, Callable[[_Job], bool]]] = [
    ("requests", "request_id of any event of a request", "no request is judged", lambda job: job.requests.is_empty()),
    ("ends of requests", events.REQUEST_COMPLETE, "a request's last event counts as its end",
     lambda job: not job.requests.is_empty() and job.lacks(events.REQUEST_COMPLETE)),
    ("engines", f"replica, node of {events.TURN_ENGINE_CALL} or {events.ENGINE_GENERATE}",
     "slow and stalled replicas and nodes are not found", lambda job: job.stays.is_empty()),
    ("stays of a turn", f"stay of {events.TURN_ENGINE_CALL}", "a turn is one stay in its engine in each step",
     lambda job: not job.stays.is_empty() and not (job.requests["stays"] > 0).any()),
    ("tokens", f"response_tokens of {events.TURN_ENGINE_CALL} or {events.ENGINE_GENERATE}",
     "long answers look like a slow engine", lambda job: job.requests["tokens"].null_count() > 0.5 * job.requests.height),
    ("queues of engines", f"queue_sec of {events.TURN_ENGINE_CALL} or {events.ENGINE_GENERATE}, or {events.ENGINE_QUEUE}",
     "waiting for an engine counts as its work", lambda job: job.stays["queue"].null_count() == job.stays.height),
    ("counters of engines", events.ENGINE_DECODE, "want of KV cache is not found", lambda job: job.lacks(events.ENGINE_DECODE)),
    ("tools", f"{events.TOOL_EXECUTION} with tool", "time in tools, if there are any, is unexplained",
     lambda job: job.lacks(events.TOOL_EXECUTION)),
    ("rewards", events.REWARD, "time in rewards is unexplained", lambda job: job.lacks(events.REWARD)),
    ("parked time", events.REQUEST_PARKED, "the time between two steps of a request counts as parked",
     lambda job: job.carried and job.lacks(events.REQUEST_PARKED)),
    ("steps of the trainer", f"{events.STEP}, {events.UPDATE_ACTOR}, {events.SYNC} of role trainer",
     "time outside the rollout is not judged", lambda job: job.lacks(events.STEP, events.UPDATE_ACTOR)),
    ("leases", f"{events.LEASE_HELD} of the coordinator, or {events.PHASE} of the trainer",
     "bubbles of pools and waits for leases are not found", lambda job: job.shared and job.lacks(
         events.PHASE, events.LEASE_HELD)),
]  # fmt: skip


def missing(analysis: Analysis) -> list[dict[str, Any]]:
    """What no line says: `what`, `needs` (event or field), `so` (what follows), and the `jobs` whose log lacks it."""
    jobs = {name: _Job(analysis, name) for name in sorted(set(analysis.requests["job"]) | set(analysis.step_ends))}
    found = [(*row, [name for name, job in jobs.items() if lacks(job)]) for *row, lacks in ASKED]
    return [{"what": what, "needs": needs, "so": so, "jobs": of} for what, needs, so, of in found if of]
