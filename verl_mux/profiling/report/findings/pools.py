"""Findings about pools: uneven ones, switches that cost much of the phases, engines starved of KV cache."""

from __future__ import annotations

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.intervals import length
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.measures.pace import shared_window

UNEVEN = 0.35  # of the time: how much busier one pool is than the other
THRASHING = 0.20  # of the phases' time
FULL = 0.95  # of the KV cache
STARVED = 0.20  # of the engine's reports
MIN_REPORTS = 10


def find_uneven_pools(analysis: Analysis) -> list[Finding]:
    """For parts of a run in which several jobs took turns."""
    leases = analysis.leases
    findings = []
    for segment in leases.segments:
        if segment.mode != "interleaved" or len(leases.pools) < 2:
            continue
        window = shared_window(segment, analysis.step_ends)
        busy = {pool: 1 - leases.bubble(pool, window) for pool in leases.pools}
        full, empty = max(busy, key=busy.__getitem__), min(busy, key=busy.__getitem__)
        if busy[full] - busy[empty] < UNEVEN:
            continue
        seconds = (busy[full] - busy[empty]) * (window[1] - window[0])
        text = f"pool {full} was busy {100 * busy[full]:.0f} % of the time, pool {empty} {100 * busy[empty]:.0f} %"
        advice = (
            f"move nodes from {empty} to {full}, or add a job that needs {empty} more than {full} "
            f"(`verl-mux plan` says which fits)"
        )
        steps = [hold.step for hold in leases.holds]
        evidence = {"busy": {pool: round(part, 4) for pool, part in busy.items()}, "segment": segment.index}
        findings.append(
            Finding("uneven_pools", "", max(steps), 0, seconds, text, advice, evidence=evidence)  # of no one worker
        )
    return findings


def find_thrashing(analysis: Analysis) -> list[Finding]:
    """One finding a job whose sleeps and wakes take THRASHING or more of its phases' time."""
    findings = []
    moves = analysis.spans.filter(pl.col("event").is_in([events.SLEEP, events.WAKE]))
    for (job,), rows in moves.group_by("job", maintain_order=True):
        work = length((h.start, h.end) for h in analysis.leases.holds if h.job == job)
        spent = length(rows.select("start", "end").rows())
        if work <= 0 or spent < THRASHING * work:
            continue
        worst = rows.sort("seconds", descending=True).row(0, named=True)
        text = f"sleep and wake took {spent:.1f} s of {work:.1f} s of phases ({100 * spent / work:.0f} %)"
        advice = (
            "give each turn more work (larger train batch, more prompts a step), keep fewer jobs in the co-execution group, "
            "or leave tags on the device that fit beside the other jobs'"
        )
        evidence = {"part": round(spent / work, 4), "moves": rows.height}
        findings.append(
            Finding(
                "thrashing_switches", job, worst["step"], worst["worker"], worst["seconds"], text, advice,
                lost=spent, evidence=evidence,
            )
        )  # fmt: skip
    return findings


def find_kv_starvation(analysis: Analysis) -> list[Finding]:
    """One finding a job and worker whose engine was full while requests queued, or threw requests out."""
    findings = []
    for (job, worker), rows in analysis.engine_reports.group_by("job", "worker", maintain_order=True):
        starved = rows.filter((pl.col("token_usage") >= FULL) & (pl.col("queued") > 0))
        if rows.height < MIN_REPORTS or starved.height < STARVED * rows.height:
            continue
        text = f"the KV cache was full with requests queued in {starved.height} of {rows.height} reports"
        findings.append(_starved(job, starved["step"][0], worker, rows, starved, text))
    retracted = analysis.spans.filter(pl.col("event") == events.ENGINE_RETRACT)
    told = {(finding.job, finding.worker) for finding in findings}
    for (job, worker), rows in retracted.group_by("job", "worker", maintain_order=True):
        if (job, worker) not in told:
            text = f"the engine threw running requests out {rows.height} times for want of KV cache"
            findings.append(_starved(job, rows["step"][0], worker, rows, rows, text))
    return findings


def _starved(job: str, step: int, worker: int, rows: pl.DataFrame, starved: pl.DataFrame, text: str) -> Finding:
    span = rows["end"].max() - rows["end"].min()
    seconds = span * starved.height / max(rows.height, 1)
    advice = (
        "raise the engine's memory fraction, lower the number of running requests or the maximum response length, "
        "or spread the requests over more replicas; what is thrown out is prefilled again"
    )
    return Finding("kv_starvation", job, step, worker, seconds, text, advice, evidence={"reports": starved.height})
