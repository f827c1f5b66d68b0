"""The report as one plain dictionary: what `--json` prints, and the source of tables, page and comparison. Called by
report_command.py; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.step_metrics import QUANTILES
from verl_mux.profiling.report.findings.all_findings import find_all
from verl_mux.profiling.report.input.clock import Faults
from verl_mux.profiling.report.input.tables import SHOWN_PARTS
from verl_mux.profiling.report.measures.analysis import Analysis, event_share
from verl_mux.profiling.report.measures.lease_times import Segment, shared_window, throughput
from verl_mux.profiling.report.measures.replicas import busy as busy_seconds

SLOWEST = 10
ENDLESS = "request without an end: counted as a request, not in completion or turns"


def summarise(analysis: Analysis) -> dict[str, Any]:
    """Everything, rounded to microseconds. Keys are described in docs/report.md; seconds unless a name says otherwise."""
    return {
        **_counts(analysis),
        "event_share": event_share(analysis.run.tables),
        "completion": completion_figures(analysis),
        "barrier_wait": barrier_wait(analysis),
        "turns": turn_figures(analysis),
        "slowest_requests": slowest_requests(analysis),
        "engine": engine_figures(analysis),
        "replicas": analysis.engines.figures("replica"),
        "nodes": analysis.engines.figures("node"),
        "bubble": bubble_figures(analysis),
        "segments": segment_figures(analysis),
        "throughput": throughput(analysis.leases, analysis.step_ends),
        "jobs": job_figures(analysis),
        "memory": memory_figures(analysis),
        "findings": [finding.to_dict() for finding in find_all(analysis)],
        "skipped_lines": sum(analysis.run.faults.skipped.values()),
        "input": _input(analysis),
    }


def _input(analysis: Analysis) -> dict[str, Any]:
    faults, endless = Faults(), analysis.requests.filter((pl.col("status") == "open") & ~pl.col("validate"))
    faults.add(analysis.run.faults)
    if endless.height:
        faults.notice(ENDLESS, _about(*endless.select("job", "step", "worker", "request_id").row(0)), endless.height)
    return {
        "files": len(analysis.run.files),
        "events": int(analysis.run.tables.totals["count"].sum()),
        "skipped": dict(faults.skipped),
        "noticed": dict(faults.noticed) | missing_workers(analysis),
        "examples": faults.examples,
    }


def _about(job: str, step: int, worker: int, request: str) -> str:
    return (f"job {job}, " if job else "") + f"step {step}, worker {worker}, request {request}"


def _counts(analysis: Analysis) -> dict[str, int]:
    totals = analysis.run.tables.totals.filter(pl.col("role") != "coordinator")
    rollout = totals.filter(pl.col("role") == "rollout")
    real = totals.filter((pl.col("role") == "rollout") | (pl.col("event") == events.STEP))
    return {
        "steps": _steps(real if real.height else totals),
        "workers": (rollout if rollout.height else totals).select("job", "worker").n_unique(),
        "requests": analysis.requests.filter(~pl.col("validate")).height,
    }


def _steps(totals: pl.DataFrame) -> int:
    """Steps of all jobs. Step 0 of our own logs is the time before the first; a plain log's may be a step."""
    noise = (pl.col("step") == 0) & (pl.col("job") != "") & pl.col("event").is_in([*events.ABOUT_THE_LOG, events.PHASE])
    return totals.filter(~noise).select("job", "step").n_unique()


def completion_figures(analysis: Analysis) -> dict[str, Any]:
    """Means over steps; a row a step; a row a step and worker."""
    steps, workers = analysis.by_step, analysis.by_worker
    names = ["t80_over_total", "total", *QUANTILES, "beyond_cut", "cut_saves"]
    means = {name: _round(steps[name].mean()) for name in names} if steps.height else {}
    means["t80_over_total_by_worker"] = _round(workers["t80_over_total"].mean()) if workers.height else None
    return {"t80_over_total": None, **means, "per_step": _rows(steps.drop("start")), "per_worker": _rows(workers.drop("start"))}


def barrier_wait(analysis: Analysis) -> dict[str, dict[str, float]]:
    """Mean seconds a step that each worker waited for the last one, by job and worker; from events, else from ends."""
    logged = analysis.run.tables.totals.filter((pl.col("event") == events.BARRIER_WAIT) & (pl.col("role") == "rollout"))
    if logged.height:
        waits = logged.group_by("job", "worker").agg(pl.col("seconds").mean())
    else:
        ends = analysis.by_worker.with_columns((pl.col("start") + pl.col("total")).alias("end"))
        ends = ends.with_columns((pl.col("end").max().over("job", "step") - pl.col("end")).alias("seconds"))
        waits = ends.group_by("job", "worker").agg(pl.col("seconds").mean())
    return _nested(waits.sort("job", "worker").rows())


def turn_figures(analysis: Analysis) -> dict[str, Any]:
    """How many turns requests have, how long those take, and the engine's time in the first, second, ... turn."""
    counted = analysis.finished.filter(pl.col("turns").is_not_null())
    by_count = counted.group_by("turns").agg(pl.len().alias("requests"), pl.col("seconds").mean()).sort("turns")
    by_turn = analysis.turns.group_by("turn").agg(pl.col("engine").mean()).sort("turn")
    of_steps = counted.group_by("job", "step", "turns").agg(pl.len().alias("requests"), pl.col("seconds").mean())
    in_steps = analysis.turns.group_by("job", "step", "turn").agg(pl.len().alias("calls"), pl.col("engine").mean())
    return {
        "mean": _round(counted["turns"].mean()) if counted.height else None,
        "counts": {str(turns): n for turns, n, _ in by_count.rows()},
        "share": {str(turns): _round(n / counted.height) for turns, n, _ in by_count.rows()},
        "request_seconds": {str(turns): _round(seconds) for turns, _, seconds in by_count.rows()},
        "engine_seconds": {str(turn): _round(seconds) for turn, seconds in by_turn.rows()},
        "requests_by_step": _rows(of_steps.sort("job", "step", "turns")),
        "engine_by_step": _rows(in_steps.sort("job", "step", "turn")),
    }


def slowest_requests(analysis: Analysis) -> list[dict[str, Any]]:
    """The requests that took longest, with the seconds of each of their parts."""
    top = analysis.finished.sort("seconds", descending=True).head(SLOWEST)
    named = ["job", "step", "worker", "request_id", "seconds", "turns", "tokens"]
    return [
        {key: _round(row[key]) for key in named}
        | {"parts": {part: _round(row[part]) for part in SHOWN_PARTS if row[part] and row[part] > 0}}
        for row in top.iter_rows(named=True)
    ]


def engine_figures(analysis: Analysis) -> dict[str, Any]:
    """Tokens a second: as the engines report, and as requests got them (their tokens over the time any of them ran)."""
    reports = analysis.engine_reports
    done = analysis.finished.filter(pl.col("tokens").is_not_null())
    got: dict[str, dict[str, float | None]] = {}
    for (job, worker), rows in done.group_by("job", "worker", maintain_order=True):
        busy = float(rows.sort("start").select(busy_seconds()).item())
        got.setdefault(job, {})[str(worker)] = _round(rows["tokens"].sum() / busy) if busy > 0 else None
    by_worker = reports.group_by("job", "worker").agg(
        pl.len().alias("reports"),
        pl.col("tokens_per_sec").mean().alias("tokens_per_sec"),
        pl.col("tokens_per_sec").max().alias("best_tokens_per_sec"),
        pl.col("token_usage").max().alias("token_usage"),
        pl.col("queued").max().alias("queued"),
    )
    return {"tokens_per_sec_by_worker": got, "reports": _rows(by_worker.sort("job", "worker"))}


def bubble_figures(analysis: Analysis) -> dict[str, float]:
    """By pool, over the parts of the run in which all jobs took turns; over all of it if they never did.

    Without leases: the part of rollout workers' time in which none of their requests was open, within steps.
    """
    leases = analysis.leases
    if not leases.pools:
        return _idle_workers(analysis)
    turns = [shared_window(s, analysis.step_ends) for s in leases.segments if s.mode == "interleaved"]
    shared = turns or [s.window for s in leases.segments]
    return {pool: _round(_mean_bubble(leases, pool, shared)) for pool in leases.pools}


def _mean_bubble(leases, pool: str, windows: list[tuple[float, float]]) -> float:
    whole = sum(end - start for start, end in windows)
    return sum(leases.bubble(pool, window) * (window[1] - window[0]) for window in windows) / whole if whole else 0.0


def _idle_workers(analysis: Analysis) -> dict[str, float]:
    done = analysis.requests.filter(~pl.col("validate"))
    if done.is_empty():
        return {}
    worker = ["job", "step", "worker"]
    covered = pl.col("end") - pl.max_horizontal("start", pl.col("end").cum_max().shift(1).over(worker))
    busy = float(done.sort("start").select(covered.clip(0.0)).sum().item())
    steps = done.group_by("job", "step").agg(
        ((pl.col("end").max() - pl.col("start").min()) * pl.col("worker").n_unique()).alias("paid")
    )
    paid = steps["paid"].sum()
    return {"rollout": _round(1 - busy / paid) if paid > 0 else 0.0}


def segment_figures(analysis: Analysis) -> list[dict[str, Any]]:
    """The parts of the run, in order: how jobs shared the nodes, how long it took, the pools' bubbles."""
    leases = analysis.leases
    return [
        {
            "index": segment.index,
            "mode": segment.mode,
            "seconds": _round(segment.window[1] - segment.window[0]),
            "bubble": {pool: _round(leases.bubble(pool, _judged(segment, analysis))) for pool in leases.pools},
        }
        for segment in leases.segments
    ]


def _judged(segment: Segment, analysis: Analysis) -> tuple[float, float]:
    return shared_window(segment, analysis.step_ends) if segment.mode == "interleaved" else segment.window


def job_figures(analysis: Analysis) -> dict[str, Any]:
    """By job: seconds of each phase, of waiting for each phase's lease and behind whom, of sync, sleep and wake."""
    leases, spans = analysis.leases, analysis.spans
    jobs = sorted({hold.job for hold in leases.holds} | set(spans.filter(pl.col("role") == "trainer")["job"]))
    return {job: _job(job, leases, spans.filter(pl.col("job") == job)) for job in jobs if job != "coordinator"}


def _job(job: str, leases, spans: pl.DataFrame) -> dict[str, Any]:
    phases: dict[str, float] = {}
    for hold in (hold for hold in leases.holds if hold.job == job):
        phases[hold.phase] = phases.get(hold.phase, 0.0) + hold.end - hold.start
    waits = [wait for wait in leases.waits if wait.job == job]
    by_phase: dict[str, float] = {}
    behind: dict[str, float] = {}
    for wait in waits:
        by_phase[wait.phase] = by_phase.get(wait.phase, 0.0) + wait.end - wait.start
        for other, seconds in wait.behind.items():
            behind[other] = behind.get(other, 0.0) + seconds
    steps = spans.filter((pl.col("event") == events.STEP) & (pl.col("role") == "trainer"))
    return {
        "steps": steps.height,
        "step_seconds": _round(steps["seconds"].median()) if steps.height else None,
        "phase_seconds": _round_all(phases),
        "lease_wait_seconds": _round_all(by_phase),
        "waited_behind": _round_all(behind),
        "sync": _moved(spans.filter(pl.col("event") == events.SYNC), None),
        "sleep": _moved(spans.filter(pl.col("event") == events.SLEEP), "tag"),
        "wake": _moved(spans.filter(pl.col("event") == events.WAKE), "tag"),
    }


def _moved(rows: pl.DataFrame, by: str | None) -> Any:
    """count, seconds, bytes and bytes a second; per value of column `by`, if given."""
    if by is not None:
        groups = rows.with_columns(pl.col(by).fill_null("all")).group_by(by, maintain_order=True)
        return {name: _moved(group, None) for (name,), group in groups}
    seconds, nbytes = float(rows["seconds"].sum() or 0.0), float(rows["bytes"].sum() or 0.0)
    rate = _round(nbytes / seconds) if seconds > 0 else None
    return {"count": rows.height, "seconds": _round(seconds), "bytes": int(nbytes), "bytes_per_sec": rate}


def memory_figures(analysis: Analysis) -> dict[str, int]:
    """The most tagged bytes of all jobs together, by node, as the coordinator saw them."""
    seen = analysis.spans.filter(pl.col("node_bytes").is_not_null() & pl.col("node").is_not_null())
    peaks = seen.group_by("node").agg(pl.col("node_bytes").max()).sort("node")
    return {node: int(peak) for node, peak in peaks.rows()}


def missing_workers(analysis: Analysis) -> dict[str, int]:
    """Workers that a step should have and lacks: `missing worker: job a, step 3, worker 2` -> 1. At most 100."""
    rollout = analysis.run.tables.totals.filter(pl.col("role") == "rollout").select("job", "step", "worker").unique()
    missing = {}
    for (job,), rows in rollout.group_by("job", maintain_order=True):
        workers = _expected_workers(set(rows["worker"]))
        for (step,), here in rows.group_by("step", maintain_order=True):
            for worker in sorted(workers - set(here["worker"])):
                about = f"job {job}, " if job else ""
                missing[f"missing worker: {about}step {step}, worker {worker}"] = 1
    return dict(sorted(missing.items())[:100])


def _expected_workers(seen: set[int]) -> set[int]:
    """Those of any step, and the few numbers that an evenly numbered row of workers leaves out.

    Ranks may be numbered by twos or fours (tensor parallel) or anyhow; only a small hole in a regular row is a miss.
    """
    stride = math.gcd(*(worker - min(seen) for worker in seen)) or 1
    row = range(min(seen), max(seen) + 1, stride)
    return seen | set(row) if len(row) - len(seen) <= max(1, len(seen) // 4) else seen


def _rows(frame: pl.DataFrame) -> list[dict[str, Any]]:
    return [{key: _round(value) for key, value in row.items()} for row in frame.iter_rows(named=True)]


def _nested(rows: list[tuple]) -> dict[str, dict[str, float]]:
    nested: dict[str, dict[str, float]] = {}
    for job, worker, seconds in rows:
        nested.setdefault(job, {})[str(worker)] = _round(seconds)
    return nested


def _round_all(figures: dict[str, float]) -> dict[str, float]:
    return {name: _round(value) for name, value in figures.items()}


def _round(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def compare(this: dict[str, Any], that: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of `figure`, `this`, `that` and `change` (this over that, minus 1; None when one is missing or that is 0)."""
    own, theirs = dict(_compared_figures(this)), dict(_compared_figures(that))
    names = [*own, *(name for name in theirs if name not in own)]
    return [_row(name, own.get(name), theirs.get(name)) for name in names]


def _row(name: str, this: float | None, that: float | None) -> dict[str, Any]:
    change = None if this is None or not that else round(this / that - 1, 6)
    return {"figure": name, "this": this, "that": that, "change": change}


def _compared_figures(summary: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    completion = summary["completion"]
    for name in ("total", "p50", "p80", "p95", "p99"):
        yield f"seconds to {name}", completion.get(name)
    yield "t80_over_total", completion["t80_over_total"]
    yield "requests", summary["requests"]
    yield "turns a request", summary["turns"]["mean"]
    for event, percent in summary["event_share"].items():
        yield f"{event} %", percent
    yield "steps a second in turns over alone", (summary["throughput"] or {}).get("ratio")
    for pool, bubble in summary["bubble"].items():
        yield f"bubble {pool}", bubble
    for job, figures in summary["jobs"].items():
        if figures["phase_seconds"]:
            yield from _job_figures(job, figures)


def _job_figures(job: str, figures: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    yield f"{job}: seconds a step", figures["step_seconds"]
    yield f"{job}: lease wait", round(sum(figures["lease_wait_seconds"].values()), 6)
    yield f"{job}: sync", figures["sync"]["seconds"]
    for verb in ("sleep", "wake"):
        yield f"{job}: {verb}", round(sum(tag["seconds"] for tag in figures[verb].values()), 6)
