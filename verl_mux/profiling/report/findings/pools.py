"""Findings about pools: uneven ones, switches that cost much of the phases, engines starved of KV cache."""

from __future__ import annotations

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.intervals import length
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.findings.waits import QUEUED
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.measures.engines import Place
from verl_mux.profiling.report.measures.pace import shared_window

# Of the time: how much busier one pool is than the other. Two jobs that share both leave a third of one idle by themselves where
# each needs the other pool half as long again.
UNEVEN = 0.45
THRASHING = 0.20  # of the phases' time
FULL = 0.95  # of the KV cache
# An engine lets nobody in for whom there is no room by its own forecast of what those inside will still write, so its cache may
# be far from full while requests wait for it.
FORECAST_FULL = 0.50
FREE_SLOTS = 0.10  # of what it may run at once: with fewer free, requests may wait for a slot
PREFILLING = 0.5  # of its highest rate: requests may wait for those before them to be prefilled
STARVED = 0.20  # of the engine's reports
MIN_REPORTS = 5  # of an engine in a step
MIN_OUT = 3  # requests thrown out in a step
THROWN_OUT = 0.05  # of its stays


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
                cost_s=spent, evidence=evidence,
            )
        )  # fmt: skip
    return findings


def starved_places(analysis: Analysis) -> dict[tuple[str, int | None, int], dict[str, float]]:
    """(job, step, replica or worker) -> `reports`, `starved` of them, `out` (requests thrown out), `seconds` of it."""
    reports = analysis.engine_reports
    thrown = analysis.spans.filter(pl.col("event") == events.ENGINE_RETRACT)
    stays = {tuple(place): count for *place, count in analysis.engines.stays.group_by("job", "step", "replica").len().rows()}
    full = ((pl.col("token_usage") >= FULL) & (pl.col("queued") > 0)).fill_null(False)
    queues = {place for place, part in analysis.engines.queue_parts.items() if part >= QUEUED}
    told = reports.group_by("job", "step", "worker").agg(
        pl.len().alias("reports"), full.sum().alias("starved"),
        ((pl.col("end").max() - pl.col("end").min()) * full.mean()).alias("seconds"),
    )  # fmt: skip
    places = {tuple(place): {"reports": n, "starved": s, "out": 0, "seconds": t or 0.0} for *place, n, s, t in told.rows()}
    for place, (count, seconds) in _held_back(analysis).items():
        if place in queues and place in places and count > places[place]["starved"]:
            places[place]["starved"], places[place]["seconds"] = count, seconds
    for job, step, worker, out, span in thrown.group_by("job", "step", "worker").agg(
        pl.col("requests").fill_null(1).sum(), pl.col("end").max() - pl.col("end").min()
    ).rows():  # fmt: skip
        it = places.setdefault((job, step, worker), {"reports": 0, "starved": 0, "out": 0, "seconds": 0.0})
        it["out"], it["seconds"] = out, max(it["seconds"], span)
    return {place: it for place, it in places.items() if _is_starved(it, stays.get(place, 0), place in queues)}


def _held_back(analysis: Analysis) -> dict[Place, tuple[int, float]]:
    """Place -> in how many of a replica's reports requests waited for nothing but KV cache, and for how many seconds in all."""
    told = analysis.engines.counters
    most = pl.col("running").max().over("job")
    slots = pl.coalesce(pl.col("job").replace_strict(_slots(analysis), default=None, return_dtype=pl.Float64), most)
    rate = pl.col("prefill_tokens_per_sec").fill_null(0.0)
    waits = (
        (pl.col("queued") > 0) & (pl.col("token_usage") >= FORECAST_FULL) & (pl.col("running") <= (1 - FREE_SLOTS) * slots)
        & ~(rate > PREFILLING * rate.max().over("job", "replica"))
    )  # fmt: skip
    held = told.with_columns(waits.fill_null(False).alias("waits")).group_by("job", "step", "replica").agg(
        pl.col("waits").sum().alias("count"), (pl.col("end").max() - pl.col("end").min()) * pl.col("waits").mean()
    )  # fmt: skip
    return {(job, step, replica): (count, seconds or 0.0) for job, step, replica, count, seconds in held.rows()}


def _slots(analysis: Analysis) -> dict[str, float]:
    """Requests that a job's replica may run at once, where its log says so."""
    told = {job: analysis.keys(job).get("actor_rollout_ref.rollout.max_num_seqs", "") for job in analysis.engines.jobs}
    return {job: float(slots) for job, slots in told.items() if slots.isdigit()}


def _is_starved(it: dict[str, float], stays: int, queues: bool) -> bool:
    """queues: its stays say so too, so that fewer reports are enough."""
    if (it["reports"] >= MIN_REPORTS or queues and it["starved"]) and it["starved"] >= STARVED * it["reports"]:
        return True
    return it["out"] >= max(MIN_OUT, THROWN_OUT * stays)


def find_kv_starvation(analysis: Analysis) -> list[Finding]:
    """One finding a job and replica whose KV cache was full while requests queued, or whose scheduler threw requests out."""
    by_engine: dict[tuple[str, int], list[tuple[int | None, dict[str, float]]]] = {}
    for (job, step, worker), it in starved_places(analysis).items():
        by_engine.setdefault((job, worker), []).append((step, it))
    return [_starved(analysis, job, worker, found) for (job, worker), found in by_engine.items()]


def _starved(analysis: Analysis, job: str, worker: int, found: list[tuple[int | None, dict[str, float]]]) -> Finding:
    step, worst = max(found, key=lambda item: (item[1]["seconds"], item[1]["out"]))
    where = analysis.engines.where(job, worker)
    total = {key: sum(it[key] for _, it in found) for key in worst}
    who = f"replica {worker} on {where['node']}" if where else "the engine"
    text = f"{who}: requests waited for KV cache in {total['starved']} of {total['reports']} reports"
    if total["out"]:
        text += f"; {total['out']} running requests were thrown out"
    advice = (
        "raise the engine's memory fraction, lower the number of running requests or the maximum response length, "
        "or spread the requests over more replicas; what is thrown out is prefilled again"
    )
    evidence = {"reports": total["starved"], "thrown_out": total["out"], "steps": sorted(s for s, _ in found if s is not None)}
    return Finding(
        "kv_starvation", job, step, None if where else worker, worst["seconds"], text, advice,
        cost_s=total["seconds"], evidence=evidence, **where,
    )  # fmt: skip
