"""A state as gauges for Prometheus, by job, replica and node; pure.

No name is one of a coordinator's metrics: both may be scraped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from verl_mux.profiling.live.requests import STATES
from verl_mux.profiling.live.state import Job, Replica, State

Sample = tuple[str, Mapping[str, str], float | None]  # metric, labels, value
# Counters come once a second while an engine works, and those of one that sleeps are no news. Files of other hosts may show late.
QUIET_S = 15.0

# metric -> (type, help)
METRICS = {
    "mux_top_quiet_seconds": ("gauge", "Since the newest line of the run's logs, by the clock of who reads them."),
    "mux_top_job_ended": ("gauge", "1 when the job has ended, 0 until then."),
    "mux_top_job_step": ("gauge", "The step that the job is at."),
    "mux_top_job_step_seconds": ("gauge", "How long the job's last whole step took."),
    "mux_top_job_reward": ("gauge", "Mean reward of the job's last whole step."),
    "mux_top_job_requests": ("gauge", "Requests of the job's step, by state."),
    "mux_top_lease_held_seconds": ("gauge", "How long a job has held its lease on the node."),
    "mux_top_lease_waited_seconds": ("gauge", "How long a job has waited for a lease on the node."),
    "mux_top_replica_running": ("gauge", "Requests that run in the engine."),
    "mux_top_replica_queued": ("gauge", "Requests in the engine's queue."),
    "mux_top_replica_kv_usage": ("gauge", "Part of the engine's KV cache that is in use, 0 to 1."),
    "mux_top_replica_tokens_per_second": ("gauge", "Tokens that the engine writes a second."),
    "mux_top_replica_step": ("gauge", "The step that the engine generates for."),
    "mux_top_replica_stays_done": ("gauge", "Stays of that step that ended in the engine and were not cut off."),
    "mux_top_replica_tokens": ("gauge", "Tokens of that step's stays that ended in the engine."),
    "mux_top_replica_retracted": ("gauge", "Requests of that step that the engine threw out for want of KV cache."),
}
_COUNTERS = {
    "running": "mux_top_replica_running",
    "queued": "mux_top_replica_queued",
    "token_usage": "mux_top_replica_kv_usage",
    "tokens_per_sec": "mux_top_replica_tokens_per_second",
}


def samples(state: State, now: float) -> Iterator[Sample]:
    """Of METRICS. now: seconds since the epoch; the time of the newest line where that is later.

    Of jobs that have ended only that and their last step; of engines whose counters are older than QUIET_S, no counters.
    """
    now = max(now, state.now)
    if state.jobs or state.replicas:
        yield "mux_top_quiet_seconds", {}, now - state.now
    yield from itertools.chain.from_iterable(_job(job, now) for _, job in sorted(state.jobs.items()))
    for (name, _), replica in sorted(state.replicas.items()):
        if name not in state.jobs or not state.jobs[name].ended:
            yield from _replica(replica, now)


def _job(job: Job, now: float) -> Iterator[Sample]:
    whose = {"job": job.name}
    yield "mux_top_job_ended", whose, int(job.ended)
    yield "mux_top_job_step", whose, job.step
    yield "mux_top_job_step_seconds", whose, job.figures.get("step_sec")
    yield "mux_top_job_reward", whose, job.figures.get("reward")
    if job.ended:
        return
    requests = job.requests.count()
    for state in STATES:
        yield "mux_top_job_requests", {**whose, "state": state}, requests[state]
    if job.phase:
        for node in job.nodes:
            yield "mux_top_lease_held_seconds", {"node": node, **whose, "phase": job.phase}, now - job.since
    if job.asks:
        for node in job.nodes_of.get(job.asks) or ("",):
            yield "mux_top_lease_waited_seconds", {"node": node, **whose, "phase": job.asks}, now - job.asked


def _replica(replica: Replica, now: float) -> Iterator[Sample]:
    where = {"job": replica.job, "replica": str(replica.number), "node": replica.node}
    if now - replica.at <= QUIET_S:
        for counter, metric in _COUNTERS.items():
            yield metric, where, replica.counters.get(counter)
    yield "mux_top_replica_step", where, replica.step
    yield "mux_top_replica_stays_done", where, replica.done
    yield "mux_top_replica_tokens", where, replica.tokens
    yield "mux_top_replica_retracted", where, replica.retracted
