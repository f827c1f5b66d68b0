"""All kinds of findings, and the report as one plain dictionary: what `--json` prints, and the source of tables, page and
comparison. A new kind of finding is one function in findings/ and one line in DETECTORS. Runs on the command line; called by
report_command.py; pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.step_metrics import QUANTILES
from verl_mux.profiling.report.findings import slow_requests, stalls, step_parts, stragglers, unended, waits
from verl_mux.profiling.report.findings.finding import NAME, Finding, Gap, Place, named
from verl_mux.profiling.report.input.reduction import SHOWN_PARTS
from verl_mux.profiling.report.input.run_log import Faults
from verl_mux.profiling.report.measures.analysis import Analysis, busy, event_share
from verl_mux.profiling.report.measures.lease_times import Leases, shared_window, throughput
from verl_mux.profiling.report.measures.missing import missing


@dataclass(frozen=True)
class Sifted:
    """What several kinds of findings build on, derived once from an Analysis."""

    analysis: Analysis

    @cached_property
    def stalls(self) -> dict[Place, Gap]:
        return stalls.stalls(self.analysis, self.starved)

    @cached_property
    def slow(self) -> list[Finding]:
        return slow_requests.find(self.analysis, self.stalls, self.starved)

    @cached_property
    def paces(self) -> pl.DataFrame:
        return stragglers.paces(self.analysis)

    def of_requests(self, *kinds: str) -> list[Finding]:
        return [finding for finding in self.slow if finding.kind in kinds]

    @cached_property
    def calls(self) -> dict[str, list[Finding]]:
        return {part: waits.find_part(self.analysis, self.slow, part) for part in waits.SHARES}

    @cached_property
    def preprocessing(self) -> list[Finding]:
        return [*stragglers.find_preprocessing(self.analysis), *self.of_requests("preprocessing")]

    @cached_property
    def _uneven_parts(self) -> list[Finding]:
        known = [*self.slow, *self.preprocessing, *(finding for part in self.calls.values() for finding in part)]
        return waits.find_uneven_parts(self.analysis, self.stalls, known)

    def uneven_parts(self, kind: str) -> list[Finding]:
        return [finding for finding in self._uneven_parts if finding.kind == kind]

    @cached_property
    def slow_engines(self) -> list[Finding]:
        return stragglers.find(self.analysis, self.paces, self.stalls, self.starved)

    @cached_property
    def odd_engines(self) -> set[tuple[str, int | None]]:
        """Job and replica, or worker where the log knows no engines, of those that are findings themselves."""
        units = {(f.job, f.worker if f.replica is None else f.replica) for f in self.slow_engines}
        return units | {(f.job, replica) for f in self.slow_engines for replica in f.evidence.get("replicas", ())}

    @cached_property
    def of_even_engines(self) -> pl.DataFrame:
        """`ordinary`, without what ran on engines that are findings themselves: the shape of the rest is the lengths'."""
        rows = pl.DataFrame(list(self.odd_engines), {"job": pl.String, "unit": pl.Int64}, orient="row")
        return self.ordinary.join(rows, on=["job", "unit"], how="anti", maintain_order="left")

    @cached_property
    def awaited(self) -> pl.DataFrame:
        """`of_even_engines`, of jobs whose steps wait for their last request: elsewhere a tail delays no other request."""
        return self.of_even_engines.filter(~pl.col("job").is_in(list(self.analysis.unawaited)))

    @cached_property
    def starved(self) -> set[Place]:
        return {(job, step, unit) for job, step, unit in waits.starved_places(self.analysis) if step is not None}

    @cached_property
    def ordinary(self) -> pl.DataFrame:
        """Finished requests without the slow ones, and with the stalls cut out of time."""
        rest = self.analysis.finished.join(named(self.slow), on=list(NAME), how="anti", maintain_order="left")
        for (job, step, unit), gap in self.stalls.items():
            here = (pl.col("job") == job) & (pl.col("step") == step) & (pl.col("unit") == unit)
            after = here & (pl.col("end") >= gap.end)
            rest = rest.with_columns(pl.when(after).then(pl.col("end") - gap.seconds).otherwise("end").alias("end"))
        return rest


# what looks for it -> the kinds it may find
DETECTORS: dict[Callable[[Sifted], list[Finding]], tuple[str, ...]] = {
    lambda run: stalls.find(run.stalls, run.analysis.engines): ("silent_gap",),
    lambda run: run.of_requests("slow_turn", "slow_request"): ("slow_turn", "slow_request"),
    lambda run: [*run.of_requests("slow_part"), *run.uneven_parts("slow_part")]: ("slow_part",),
    lambda run: run.slow_engines: ("straggler",),
    lambda run: stragglers.find_slow_engines(run.paces, {*run.stalls, *run.starved}): ("slow_engines",),
    lambda run: stragglers.find_uneven_load(run.analysis, run.odd_engines): ("uneven_load",),
    lambda run: stragglers.find_long_tail(run.awaited) or run.of_requests("long_tail"): ("long_tail",),
    lambda run: [*run.preprocessing, *run.uneven_parts("preprocessing")]: ("preprocessing",),
    lambda run: unended.find_failed(run.analysis) or unended.find_given_up(run.analysis): ("failed_requests",),
    lambda run: unended.find_endless(run.analysis): ("endless_request",),
    lambda run: waits.find_queueing(run.analysis, run.starved): ("queueing",),
    lambda run: [*run.calls["tool"], *run.uneven_parts("tool_wait")]: ("tool_wait",),
    lambda run: [*run.calls["reward"], *run.uneven_parts("reward_wait")]: ("reward_wait",),
    lambda run: waits.find_lease_wait(run.analysis) or run.uneven_parts("lease_wait"): ("lease_wait",),
    lambda run: waits.find_kv_starvation(run.analysis): ("kv_starvation",),
    lambda run: waits.find_uneven_pools(run.analysis): ("uneven_pools",),
    lambda run: waits.find_thrashing(run.analysis): ("thrashing_switches",),
    lambda run: step_parts.find_slow(run.analysis): ("slow_phase",),
    lambda run: step_parts.find_incidents(run.analysis): ("incident",),
}


def find_all(analysis: Analysis) -> list[Finding]:
    """Everything found, what cost most first."""
    run = Sifted(analysis)
    found = [finding for detector in DETECTORS for finding in detector(run)]
    return sorted(found, key=lambda finding: (-(finding.cost_s or finding.seconds), finding.kind, finding.step or 0))


SLOWEST = 10
ENDLESS = "request without an end: counted as a request, not in completion or turns"


def summarise(analysis: Analysis) -> dict[str, Any]:
    """Everything, rounded to microseconds. docs/report.md describes the keys; seconds unless a name says otherwise."""
    summary = {
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
        "findings": [],
        "skipped_lines": sum(analysis.run.faults.skipped.values()),
        "input": _input(analysis),
    }
    return _rounded(summary) | {"findings": [finding.to_dict() for finding in find_all(analysis)]}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def _input(analysis: Analysis) -> dict[str, Any]:
    faults, endless = Faults(), analysis.requests.filter((pl.col("status") == "open") & ~pl.col("validate"))
    faults.add(analysis.run.faults)
    if dropped := int(analysis.run.tables.totals.filter(pl.col("event") == events.LOG_DROPPED)["count"].sum()):
        faults.notice("events lost by a full queue (log_dropped)", "", dropped)
    if endless.height:
        faults.notice(ENDLESS, _about(*endless.select("job", "step", "worker", "request_id").row(0)), endless.height)
    return {
        "files": len(analysis.run.files),
        "events": int(analysis.run.tables.totals["count"].sum()),
        "skipped": dict(faults.skipped),
        "noticed": dict(faults.noticed) | missing_workers(analysis),
        "examples": faults.examples,
        "missing": missing(analysis),
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
    means = {name: steps[name].mean() for name in names} if steps.height else {}
    means["t80_over_total_by_worker"] = workers["t80_over_total"].mean()
    rows = {"per_step": steps.drop("start").to_dicts(), "per_worker": workers.drop("start").to_dicts()}
    return {"t80_over_total": None, **means, **rows}


def barrier_wait(analysis: Analysis) -> dict[str, dict[str, float | None]]:
    """Mean seconds a step that each worker waited for the last one, by job and worker; from events, else from ends."""
    logged = analysis.run.tables.totals.filter((pl.col("event") == events.BARRIER_WAIT) & (pl.col("role") == "rollout"))
    if logged.is_empty():
        end = pl.col("start") + pl.col("total")
        logged = analysis.by_worker.with_columns(seconds=end.max().over("job", "step") - end)
    return _nested(logged.group_by("job", "worker").agg(pl.col("seconds").mean()).sort("job", "worker").rows())


def turn_figures(analysis: Analysis) -> dict[str, Any]:
    """How many turns requests have, how long those take, and the engine's time in the first, second, ... turn."""
    counted = analysis.finished.filter(pl.col("turns").is_not_null())
    by_count = counted.group_by("turns").agg(pl.len().alias("requests"), pl.col("seconds").mean()).sort("turns")
    by_turn = analysis.turns.group_by("turn").agg(pl.col("engine").mean()).sort("turn")
    of_steps = counted.group_by("job", "step", "turns").agg(pl.len().alias("requests"), pl.col("seconds").mean())
    in_steps = analysis.turns.group_by("job", "step", "turn").agg(pl.len().alias("calls"), pl.col("engine").mean())
    return {
        "mean": counted["turns"].mean(),
        "counts": {str(turns): n for turns, n, _ in by_count.rows()},
        "share": {str(turns): n / counted.height for turns, n, _ in by_count.rows()},
        "request_seconds": {str(turns): seconds for turns, _, seconds in by_count.rows()},
        "engine_seconds": {str(turn): seconds for turn, seconds in by_turn.rows()},
        "requests_by_step": of_steps.sort("job", "step", "turns").to_dicts(),
        "engine_by_step": in_steps.sort("job", "step", "turn").to_dicts(),
    }


def slowest_requests(analysis: Analysis) -> list[dict[str, Any]]:
    """The requests that took longest, with the seconds of each of their parts."""
    top = analysis.finished.sort("seconds", descending=True).head(SLOWEST)
    named = ["job", "step", "worker", "request_id", "seconds", "turns", "tokens"]
    return [
        {key: row[key] for key in named} | {"parts": {part: row[part] for part in SHOWN_PARTS if row[part] and row[part] > 0}}
        for row in top.to_dicts()
    ]


def engine_figures(analysis: Analysis) -> dict[str, Any]:
    """Tokens a second: as the engines report, and as requests got them (their tokens over the time any of them ran)."""
    done = analysis.finished.filter(pl.col("tokens").is_not_null())
    got = done.group_by("job", "worker", maintain_order=True).agg(pl.col("tokens").sum(), busy())
    rates = [(job, worker, tokens / busy if busy > 0 else None) for job, worker, tokens, busy in got.rows()]
    by_worker = analysis.engine_reports.group_by("job", "worker").agg(
        pl.len().alias("reports"),
        pl.col("tokens_per_sec").mean(),
        pl.col("tokens_per_sec").max().alias("best_tokens_per_sec"),
        pl.col("token_usage", "queued").max(),
    )
    return {"tokens_per_sec_by_worker": _nested(rates), "reports": by_worker.sort("job", "worker").to_dicts()}


def bubble_figures(analysis: Analysis) -> dict[str, float]:
    """By pool, over the parts of the run in which all jobs took turns; over all of it if they never did.

    Without leases: the part of rollout workers' time in which none of their requests was open, within steps.
    """
    leases = analysis.leases
    if not leases.pools:
        return _idle_workers(analysis)
    turns = [shared_window(s, analysis.step_ends) for s in leases.segments if s.mode == "interleaved"]
    shared = turns or [s.window for s in leases.segments]
    whole = sum(end - start for start, end in shared)
    return {
        pool: sum(leases.bubble(pool, (start, end)) * (end - start) for start, end in shared) / whole if whole else 0.0
        for pool in leases.pools
    }


def _idle_workers(analysis: Analysis) -> dict[str, float]:
    done = analysis.requests.filter(~pl.col("validate"))
    if done.is_empty():
        return {}
    covered = float(done.group_by("job", "step", "worker").agg(busy())["busy"].sum())
    steps = done.group_by("job", "step").agg(
        ((pl.col("end").max() - pl.col("start").min()) * pl.col("worker").n_unique()).alias("paid")
    )
    paid = steps["paid"].sum()
    return {"rollout": (1 - covered / paid) if paid > 0 else 0.0}


def segment_figures(analysis: Analysis) -> list[dict[str, Any]]:
    """The parts of the run, in order: how jobs shared the nodes, how long it took, the pools' bubbles."""
    leases, figures = analysis.leases, []
    for segment in leases.segments:
        judged = shared_window(segment, analysis.step_ends) if segment.mode == "interleaved" else segment.window
        bubble = {pool: leases.bubble(pool, judged) for pool in leases.pools}
        seconds = segment.window[1] - segment.window[0]
        figures.append({"index": segment.index, "mode": segment.mode, "seconds": seconds, "bubble": bubble})
    return figures


def job_figures(analysis: Analysis) -> dict[str, Any]:
    """By job: seconds of each phase, of waiting for each phase's lease and behind whom, of sync, sleep and wake."""
    leases, spans = analysis.leases, analysis.spans
    jobs = sorted({hold.job for hold in leases.holds} | set(spans.filter(pl.col("role") == "trainer")["job"]))
    return {job: _job(job, leases, spans.filter(pl.col("job") == job)) for job in jobs if job != "coordinator"}


def _job(job: str, leases: Leases, spans: pl.DataFrame) -> dict[str, Any]:
    phases, by_phase, behind = (defaultdict[str, float](float) for _ in range(3))
    for hold in (hold for hold in leases.holds if hold.job == job):
        phases[hold.phase] += hold.seconds
    for wait in (wait for wait in leases.waits if wait.job == job):
        by_phase[wait.phase] += wait.seconds
        for other, seconds in wait.behind.items():
            behind[other] += seconds
    steps = spans.filter((pl.col("event") == events.STEP) & (pl.col("role") == "trainer"))
    return {
        "steps": steps.height,
        "step_seconds": steps["seconds"].median(),
        "phase_seconds": phases,
        "lease_wait_seconds": by_phase,
        "waited_behind": behind,
        "sync": _moved(spans.filter(event=events.SYNC)),
        **{verb: _moved_by_tag(spans.filter(event=verb)) for verb in (events.SLEEP, events.WAKE)},
    }


def _moved_by_tag(rows: pl.DataFrame) -> dict[str, Any]:
    groups = rows.group_by(pl.col("tag").fill_null("all"), maintain_order=True)
    return {tag: _moved(group) for (tag,), group in groups}


def _moved(rows: pl.DataFrame) -> dict[str, Any]:
    seconds, nbytes = float(rows["seconds"].sum() or 0.0), float(rows["bytes"].sum() or 0.0)
    rate = nbytes / seconds if seconds > 0 else None
    return {"count": rows.height, "seconds": seconds, "bytes": int(nbytes), "bytes_per_sec": rate}


def memory_figures(analysis: Analysis) -> dict[str, int]:
    """The most tagged bytes of all jobs together, by node, as the coordinator saw them."""
    seen = analysis.spans.filter(pl.col("node_bytes").is_not_null() & pl.col("node").is_not_null())
    peaks = seen.group_by("node").agg(pl.col("node_bytes").max()).sort("node")
    return {node: int(peak) for node, peak in peaks.rows()}


def missing_workers(analysis: Analysis) -> dict[str, int]:
    """Workers that a step should have and lacks: `missing worker: job a, step 3, worker 2` -> 1. At most 100."""
    rollout = analysis.run.tables.totals.filter(pl.col("role") == "rollout").select("job", "step", "worker").unique()
    missing = []
    for (job,), rows in rollout.group_by("job"):
        workers = _expected_workers(set(rows["worker"]))
        for (step,), here in rows.group_by("step"):
            about = (f"job {job}, " if job else "") + f"step {step}"
            missing += [f"missing worker: {about}, worker {worker}" for worker in workers - set(here["worker"])]
    return dict.fromkeys(sorted(missing)[:100], 1)


def _expected_workers(seen: set[int]) -> set[int]:
    """Those of any step, and the few numbers that an evenly numbered row of workers leaves out.

    Ranks may be numbered by twos or fours (tensor parallel) or anyhow; only a small hole in a regular row is a miss.
    """
    stride = math.gcd(*(worker - min(seen) for worker in seen)) or 1
    row = range(min(seen), max(seen) + 1, stride)
    return seen | set(row) if len(row) - len(seen) <= max(1, len(seen) // 4) else seen


def _nested(rows: list[tuple]) -> dict[str, dict[str, float | None]]:
    nested: dict[str, dict[str, float | None]] = {}
    for job, worker, seconds in rows:
        nested.setdefault(job, {})[str(worker)] = seconds
    return nested


def compare(this: dict[str, Any], that: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of `figure`, `this`, `that` and `change` (this over that, minus 1; None when one is missing or that is 0)."""
    own, theirs = dict(_compared_figures(this)), dict(_compared_figures(that))
    pairs = [(name, own.get(name), theirs.get(name)) for name in own | theirs]
    changes = [None if one is None or not other else round(one / other - 1, 6) for _, one, other in pairs]
    names = ("figure", "this", "that", "change")
    return [dict(zip(names, (*pair, change), strict=True)) for pair, change in zip(pairs, changes, strict=True)]


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
            yield f"{job}: seconds a step", figures["step_seconds"]
            yield f"{job}: lease wait", round(sum(figures["lease_wait_seconds"].values()), 6)
            yield f"{job}: sync", figures["sync"]["seconds"]
            for verb in ("sleep", "wake"):
                yield f"{job}: {verb}", round(sum(tag["seconds"] for tag in figures[verb].values()), 6)
