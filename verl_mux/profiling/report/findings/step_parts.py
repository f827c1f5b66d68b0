"""Findings about work outside of requests: `slow_phase`, a part of a step (sync, log-probabilities, an update, a checkpoint,
sleep and wake, a rollout worker's own work) that took far longer than in other steps or than on other ranks; and `incident`,
what the coordinator or an agent itself logs as gone wrong. Runs in the report; called by output/summary.py; pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.findings.finding import Finding, over_steps
from verl_mux.profiling.report.measures.analysis import Analysis, log_spread, middle

# What waits for others, or holds what is judged by itself; and engines, which have rules of their own.
_NOT_JUDGED = events.ENCLOSING | {*events.ABOUT_THE_LOG} | {
    events.LEASE_WAIT, events.LEASE_FENCED, events.BARRIER_WAIT, events.GENERATE, events.MIGRATION, events.ENGINE_DECODE,
    events.ENGINE_RETRACT, events.ENGINE_STALLED, events.ENGINE_QUEUE, events.ENGINE_GENERATE, events.PREPROCESSING,
    events.GROWTH,
}  # fmt: skip
_ROLLOUT = {events.GENERATE_PHASE, events.SAMPLE_WAIT}  # judged by its requests, where the log has those
_BY_TOKENS = {
    events.OLD_LOG_PROB, events.REF, events.VALUES, events.ADV, events.UPDATE_CRITIC, events.UPDATE_ACTOR, events.SAMPLE_WAIT,
    events.GENERATE_PHASE,
}  # fmt: skip
TIMES = 2.0  # as long as usual, in a step
TIMES_ON_RANK = 1.5  # as long as on the middle one of the other ranks
DEVIATIONS, MIN_SPREAD = 5.0, 0.05  # of the logarithm
COST, LEAST_S = 0.05, 1.0  # of the job's median step, and seconds
SYNC = 0.30  # of the median step, in a run whose sync is slow in all steps
MIN_TIMES = 3  # steps in which a part was seen that is judged
MIN_RANKS = 3
ADVICE = {
    "step": "compare this step's machines, network, disk and memory with another step's: what else ran, what was retried",
    "rank": "look at this rank's device and host: clocks, other processes, links; all ranks wait for it",
    "sync": "see which part of it takes the time (gather, send, wait, receive, load) and over which links it goes",
}


def find_slow(analysis: Analysis) -> list[Finding]:
    """One finding a job, event and rank, at its worst step."""
    timed = pl.col("seconds").is_not_null() & ~pl.col("event").is_in(list(_NOT_JUDGED)) & (pl.col("role") != "coordinator")
    rows = analysis.spans.filter(timed & (pl.col("role") != "agent"))
    rows = rows.filter(~pl.col("event").is_in(list(_ROLLOUT)) | ~pl.col("job").is_in(analysis.requests["job"].unique().to_list()))
    each = rows.group_by("job", "role", "event", "step", "worker", maintain_order=True).agg(
        pl.col("seconds").sum(), pl.col("start").min(), pl.col("end").max()
    )  # fmt: skip
    findings = []
    for (job,), of_job in each.group_by("job", maintain_order=True):
        step_s = _usual_step(analysis, job)
        tokens = dict(analysis.finished.filter(pl.col("job") == job).group_by("step").agg(pl.col("tokens").sum()).iter_rows())
        for (_, event), of_event in of_job.group_by("role", "event", maintain_order=True):
            ranks = list(_slow_ranks(of_event, step_s))
            slow = list(_slow_steps(of_event, step_s, tokens if event in _BY_TOKENS else {}, {f.step for f in ranks}))
            by_rank = {f.worker: [g for g in ranks if g.worker == f.worker] for f in ranks}
            findings += [over_steps(found) for found in (slow, *by_rank.values()) if found]
            if event == events.SYNC and not slow and (heavy := _heavy(of_event, step_s)):
                findings.append(heavy)
    return findings


def _usual_step(analysis: Analysis, job: str) -> float:
    spans = analysis.spans.filter((pl.col("job") == job) & (pl.col("event") == events.STEP))["seconds"].drop_nulls()
    if spans.len() == 0:  # how long what is logged of a step went on
        steps = analysis.run.tables.totals.filter(job=job).group_by("step").agg(pl.col("first").min(), pl.col("last").max())
        spans = (steps["last"] - steps["first"]).drop_nulls()
    return float(spans.median() or 0.0)


def _slow_ranks(rows: pl.DataFrame, step_s: float) -> Iterator[Finding]:
    for (step,), here in rows.group_by("step", maintain_order=True):
        worst = here.filter(pl.col("seconds") >= pl.col("seconds").median() + max(COST * step_s, LEAST_S))
        for row in worst.rows(named=True) if here.height >= MIN_RANKS else ():
            others = [other for worker, other in here.select("worker", "seconds").rows() if worker != row["worker"]]
            usual = max(middle(others), 1e-9)
            least = max(TIMES_ON_RANK, np.exp(DEVIATIONS * max(log_spread(others), MIN_SPREAD)))
            if row["seconds"] >= least * usual and row["seconds"] - usual >= max(COST * step_s, LEAST_S):
                took = f"{row['event']} took {row['seconds']:.1f} s on worker {row['worker']} in step {step}"
                text = f"{took}, {usual:.1f} s on the others"
                yield _finding(row, usual, text, "rank", row["worker"])


def _slow_steps(rows: pl.DataFrame, step_s: float, tokens: dict[int, int], others: set[int | None]) -> Iterator[Finding]:
    """Not the first, which may warm up. A step with more tokens may take so much longer."""
    steps = rows.sort("seconds").group_by("step", maintain_order=True).last().sort("step").rows(named=True)
    if len(steps) < MIN_TIMES:
        return
    took = np.maximum([row["seconds"] for row in steps], 1e-9)
    usual = float(np.quantile(took, 0.25))
    spread = max(log_spread(took[took <= TIMES_ON_RANK * usual]), MIN_SPREAD)
    known = [tokens[row["step"]] for row in steps if tokens.get(row["step"])]
    for row in steps[1:]:
        more = max(tokens.get(row["step"], 0) / float(np.quantile(known, 0.25)), 1.0) if known else 1.0
        least, expected = max(TIMES, np.exp(DEVIATIONS * spread)), usual * more
        late = row["seconds"] - expected
        if row["step"] not in others and row["seconds"] >= least * expected and late >= max(2 * COST * step_s, LEAST_S):
            text = f"{row['event']} took {row['seconds']:.1f} s in step {row['step']}, {expected:.1f} s is usual"
            yield _finding(row, expected, text, "step")


def _heavy(rows: pl.DataFrame, step_s: float) -> Finding | None:
    worst = rows.sort("seconds").row(-1, named=True)
    usual = float(rows.group_by("step").agg(pl.col("seconds").max())["seconds"].median())
    if step_s <= 0 or usual < max(SYNC * step_s, LEAST_S):
        return None
    return _finding(worst, 0.0, f"{worst['event']} takes {100 * usual / step_s:.0f} % of the step, {usual:.1f} s", "sync")


def _finding(row: dict[str, Any], usual: float, text: str, advice: str, rank: int | None = None) -> Finding:
    evidence = {"event": row["event"], "usual_sec": round(usual, 6), "role": row["role"]}
    return Finding(
        "slow_phase", row["job"], row["step"], rank, row["seconds"] - usual, text, ADVICE[advice], evidence=evidence,
        start=row["start"], end=row["end"],
    )  # fmt: skip


_SAID = {
    events.HOST_GONE: "host {host} was silent",
    events.NODE_FENCED: "node {node} was taken out of use: {reason}",
    events.JOB_SILENT: "the heartbeats of job {job} stopped",
    events.LEASE_RECLAIMED: "the lease of job {job} for {phase} ended although the job did not return it",
    events.LEASE_FENCED: "the coordinator did not answer job {job}; its memory slept",
    events.PHASE_OVERDUE: "phase {phase} of job {job} takes far longer than earlier ones",
    events.AGENT_KILLED: "a process that outlived job {job} was killed",
    events.MOVE_GIVEN_UP: "job {job} did not come back from a move: {reason}",
}
SAID_ADVICE = "read that process's own log around this time; what else this report finds in that step may follow from it"


def find_incidents(analysis: Analysis) -> list[Finding]:
    """One finding a job, event and node or host."""
    found: dict[tuple[Any, ...], Finding] = {}
    for row in analysis.spans.filter(pl.col("event").is_in(list(_SAID))).iter_rows(named=True):
        about = row | {"job": row["of_job"] or row["job"]}
        key = (row["event"], about["job"], row["node"], row["host"])
        count = found[key].evidence["count"] + 1 if key in found else 1
        text = _SAID[row["event"]].format(**{name: "?" if value is None else value for name, value in about.items()})
        what = ("incident", about["job"], row["step"], None, row["seconds"] or 0.0, text, SAID_ADVICE)
        times = {"start": row["start"], "end": row["end"]}
        new = Finding(*what, node=row["node"], evidence={"event": row["event"], "count": count}, **times)
        found[key] = new if key not in found or new.seconds >= found[key].seconds else found[key]
    return list(found.values())
