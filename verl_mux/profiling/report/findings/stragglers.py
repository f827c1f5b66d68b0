"""Finding `straggler`, where the log knows no engines: a worker whose requests all took longer than those of its peers, so that
the others waited for it. Where it does, see slow_engines.py."""

from __future__ import annotations

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.measures.analysis import Analysis

SLOWER = 1.5  # times its peers
DEVIATIONS = 5.0
MIN_REQUESTS = 8
MIN_WORKERS = 3
MIN_SPREAD = 0.05  # of the logarithm: peers closer than that differ by chance
FEW_SPREAD = 0.35  # the same over the root of how many requests there are: a handful says little of its own spread
COST = 0.10  # of the step
ADVICE = (
    "its requests took {ratio:.1f} times as long as elsewhere: {reason}; compare this worker's clocks, neighbours and "
    "prefix cache, and let replicas pull requests as they finish instead of a fixed share each"
)


def find(analysis: Analysis, ordinary: pl.DataFrame) -> list[Finding]:
    """One finding a job and worker, at its worst step, with all the steps it happened in."""
    seen: dict[tuple[str, int | None], list[Finding]] = {}
    ordinary = ordinary.filter(~pl.col("job").is_in([*analysis.engines.jobs, *analysis.unawaited]))
    for finding in [*_by_requests(ordinary), *_by_totals(analysis)]:
        seen.setdefault((finding.job, finding.worker), []).append(finding)
    return [together(found) for found in seen.values()]


def together(found: list[Finding]) -> Finding:
    """The findings of one place in several steps, as one: its worst step, and what they cost together."""
    worst = max(found, key=lambda finding: finding.seconds)
    evidence = worst.evidence | {"steps": sorted({finding.step for finding in found if finding.step is not None})}
    lost = sum(finding.seconds for finding in found)
    return Finding(**{**worst.__dict__, "cost_s": lost, "evidence": evidence})


def _by_requests(ordinary: pl.DataFrame) -> list[Finding]:
    findings = []
    for (job, step), frame in ordinary.group_by("job", "step", maintain_order=True):
        workers = {
            worker: rows for (worker,), rows in frame.group_by("worker", maintain_order=True) if rows.height >= MIN_REQUESTS
        }
        if len(workers) < MIN_WORKERS:
            continue
        bulk = {worker: _bulk_end(rows) for worker, rows in workers.items()}
        whole = max(rows["end"].max() - rows["start"].min() for rows in workers.values())
        for worker, (end, noise) in bulk.items():
            others = [value for other, (value, _) in bulk.items() if other != worker]
            ratio = _slower(end, others, noise)
            lost = end - float(np.median(others))
            if ratio and lost >= COST * whole:
                reason = _reason(workers, worker)
                findings.append(_finding(job, step, worker, ratio, lost, reason))
    return findings


def _bulk_end(rows: pl.DataFrame) -> tuple[float, float]:
    """When nine tenths of a worker's requests were done, in seconds, and the spread of its logarithm by chance."""
    ends = np.sort(rows["end"].to_numpy() - rows["start"].min())
    count = len(ends)
    reach = 2 * np.sqrt(0.09 * count)
    low, middle, high = (ends[int(np.clip(np.ceil(0.9 * count + d) - 1, 0, count - 1))] for d in (-reach, 0, reach))
    spread = float(np.log(max(high, 1e-9) / max(low, 1e-9))) / 4
    return float(middle), max(spread, FEW_SPREAD / np.sqrt(count))


def _slower(value: float, others: list[float], noise: float) -> float | None:
    """How many times slower than its peers, or None when that may be chance."""
    middle = float(np.median(others))
    if middle <= 0 or value < SLOWER * middle:
        return None
    logs = np.log(np.maximum(others, 1e-9))
    spread = 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
    far = np.log(value / middle) >= DEVIATIONS * max(spread, noise, MIN_SPREAD)
    return value / middle if far and value > max(others) else None


def _reason(workers: dict[int, pl.DataFrame], worker: int) -> str:
    tokens = {w: rows["tokens"].median() for w, rows in workers.items()}
    others = [value for w, value in tokens.items() if w != worker and value]
    if tokens[worker] is None or not others:
        return "the log has no token counts to say whether its answers were longer"
    times = tokens[worker] / float(np.median(others))
    if times > 1.25:
        return f"its answers were {times:.1f} times as long, so share out the long prompts"
    return "its answers were no longer, so its engine was slower"


def _by_totals(analysis: Analysis) -> list[Finding]:
    """Where the log has no requests: from the time each worker generated."""
    totals = analysis.run.tables.totals.filter(
        (pl.col("event") == events.GENERATE) & ~pl.col("of_request") & (pl.col("role") == "rollout")
    )
    with_requests = analysis.finished.select("job", "step").unique()
    findings = []
    for (job, step), frame in totals.join(with_requests, on=["job", "step"], how="anti").group_by("job", "step"):
        spent = dict(frame.select("worker", "seconds").iter_rows())
        if len(spent) < MIN_WORKERS:
            continue
        for worker, seconds in spent.items():
            others = [value for other, value in spent.items() if other != worker]
            ratio = _slower(seconds, others, 0.0)
            if ratio:
                lost = seconds - float(np.median(others))
                reason = "the log has no requests to say why"
                findings.append(_finding(job, step, worker, ratio, lost, reason))
    return findings


def _finding(job: str, step: int, worker: int, ratio: float, lost: float, reason: str) -> Finding:
    text = f"worker {worker} was {ratio:.1f} times slower than its peers; they waited {lost:.1f} s for it"
    advice = ADVICE.format(ratio=ratio, reason=reason)
    return Finding("straggler", job, step, worker, lost, text, advice, evidence={"times_slower": round(ratio, 3)})
