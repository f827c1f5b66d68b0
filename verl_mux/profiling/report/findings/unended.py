"""Findings about requests that came to no end: `failed_requests`, whose agent loop raised, and `endless_request`, of which no
event comes any more while the run goes on. Runs in the report; called by output/summary.py; pure.
"""

from __future__ import annotations

import polars as pl

from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.measures.analysis import Analysis

FAILED = 0.01  # of a job's requests
NAMED = 3  # errors, the most frequent
# Without an event for SILENT_S, and for SILENT_TIMES as long as the longest request that ended.
SILENT_S, SILENT_TIMES = 60.0, 3.0
FAILED_ADVICE = "look at what raised it: a tool server that is down, or a reward that cannot read the response, fails all"
GIVEN_UP, GIVEN_UP_TIMES, MIN_GIVEN_UP = 0.05, 3.0, 5  # of a step's requests; times the usual part; requests
GIVEN_UP_ADVICE = "see what cancelled them: a timeout, a lost worker, a trainer that ended the step early"
ENDLESS_ADVICE = (
    "give tool calls and rewards a timeout, or every sample one by mux.rollout.sample_timeout_s; a step waits for its last"
    " sample, and holds its nodes until then"
)


def find_failed(analysis: Analysis) -> list[Finding]:
    """One a job, with what its requests failed of."""
    found = []
    for (job,), rows in analysis.requests.filter(~pl.col("validate")).group_by("job", maintain_order=True):
        failed = rows.filter((pl.col("status") == "aborted") & pl.col("failed").is_not_null())
        if failed.height < max(1, FAILED * rows.height):
            continue
        why = dict(failed["failed"].value_counts(sort=True).iter_rows())
        named = ", ".join(f"{error} ({count})" for error, count in list(why.items())[:NAMED])
        seconds, step = float(failed["seconds"].fill_null(0.0).sum()), failed["step"].min()
        text = f"{failed.height} of {rows.height} requests failed: {named}"
        found.append(Finding("failed_requests", job, step, None, seconds, text, FAILED_ADVICE, evidence={"errors": why}))
    return found


def find_given_up(analysis: Analysis) -> list[Finding]:
    """Of steps in which far more requests than in the others of a job were given up: cancelled, or cut off for good."""
    found = []
    for (job,), rows in analysis.requests.filter(~pl.col("validate")).group_by("job", maintain_order=True):
        gone = (pl.col("status") == "aborted") & pl.col("failed").is_null()
        steps = rows.group_by("step").agg(gone.sum().alias("gone"), gone.mean().alias("part"), pl.len().alias("of")).sort("step")
        usual = float(steps["part"].median() or 0.0)
        bad = steps.head(-1).filter((pl.col("part") >= max(GIVEN_UP, GIVEN_UP_TIMES * usual)) & (pl.col("gone") >= MIN_GIVEN_UP))
        if bad.is_empty():
            continue
        step, count, _, whole = bad.sort("part").row(-1)
        seconds = float(rows.filter(gone & (pl.col("step") == step))["seconds"].fill_null(0.0).sum())
        text = f"{count} of {whole} requests of step {step} were given up, {100 * usual:.0f} % is usual"
        evidence = {"steps": bad["step"].to_list(), "requests": count}
        found.append(Finding("failed_requests", job, step, None, seconds, text, GIVEN_UP_ADVICE, evidence=evidence))
    return found


def find_endless(analysis: Analysis) -> list[Finding]:
    """One a request. Where lines of the log were left out, an earlier step's request may have lost its end with them."""
    over, found = analysis.run.tables.totals["last"].max(), []
    torn = bool(analysis.run.faults.skipped)
    newest = dict(analysis.requests.group_by("job").agg(pl.col("step").max()).iter_rows())
    for row in analysis.requests.filter((pl.col("status") == "open") & ~pl.col("validate")).iter_rows(named=True):
        longest = analysis.finished.filter(pl.col("job") == row["job"])["seconds"].max() or 0.0
        is_excused = torn and row["step"] < newest[row["job"]]
        if (silent := over - row["end"]) < max(SILENT_S, SILENT_TIMES * longest) or is_excused:
            continue
        where, last = f"{row['request_id']} on worker {row['worker']}", row["last_event"].partition(" ")[2]
        text = f"{where} has no end: in turn {row['turns']}, {silent:.0f} s after its last event, {last}"
        place = (row["job"], row["step"], row["worker"], silent)
        about = {"request_id": row["request_id"], "turn": row["turns"], "start": row["end"], "end": over}
        found.append(Finding("endless_request", *place, text, ENDLESS_ADVICE, **about, evidence={"last_event": last}))
    return found
