"""Findings about a step's shape: a long tail of requests, and preprocessing that takes much of it."""

from __future__ import annotations

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.measures.completion import completion

LONG_TAIL = 0.43  # four fifths of the requests were done within this part of the time
LONG_LENGTHS = 0.60  # four fifths of the answers have no more than this part of the longest one's tokens
MIN_REQUESTS = 20
HEAVY = 0.15  # of the step
PREPROCESS_ADVICE = (
    "prompts do not depend on the step: tokenise and template them once, when the data set is built, "
    "or in the agent loop's workers while the step before still runs"
)


def find_long_tail(ordinary: pl.DataFrame) -> list[Finding]:
    """One finding a job, when the median step has a long tail after gaps and abnormal requests are set aside."""
    findings = []
    for (job,), rows in ordinary.group_by("job", maintain_order=True):
        shapes = completion(rows, ["step", "worker"]).filter(pl.col("requests") >= MIN_REQUESTS)
        if shapes.is_empty():
            shapes = completion(rows, ["step"]).filter(pl.col("requests") >= MIN_REQUESTS)
        if shapes.is_empty() or shapes["t80_over_total"].median() > LONG_TAIL or not _in_the_lengths(rows):
            continue
        findings.append(_long_tail(job, rows, shapes))
    return findings


def _in_the_lengths(rows: pl.DataFrame) -> bool:
    """Whether answers are as uneven as their ends. A log without tokens cannot say no."""
    steps = rows.drop_nulls("tokens").group_by("step").agg(
        pl.len().alias("requests"), part=pl.col("tokens").quantile(0.8, "nearest") / pl.col("tokens").max().cast(pl.Float64)
    )  # fmt: skip
    told = steps.filter(pl.col("requests") >= MIN_REQUESTS)["part"]
    return told.is_empty() or bool(told.median() <= LONG_LENGTHS)


def _long_tail(job: str, rows: pl.DataFrame, shapes: pl.DataFrame) -> Finding:
    share = float(shapes["t80_over_total"].median())
    tails = shapes.with_columns((pl.col("total") - pl.col("p80")).alias("tail")).sort("tail", descending=True)
    worst = tails.row(0, named=True)
    last = rows.filter(pl.col("step") == worst["step"]).sort("end").row(-1, named=True)
    seconds = float(tails["tail"].median())
    steps = shapes["step"].n_unique()
    text = f"80 % of the requests were done in the first {100 * share:.0f} % of the time; the rest took {seconds:.1f} s more"
    return Finding(
        "long_tail", job, worst["step"], last["worker"], seconds, text, _length_advice(rows["tokens"].drop_nulls()),
        request_id=last["request_id"], cost_s=seconds * steps, evidence={"t80_over_total": round(share, 4), "steps": steps},
    )  # fmt: skip


def _length_advice(tokens: pl.Series) -> str:
    otherwise = (
        "set long prompts off first, over-sample and requeue the last prompt groups, cut long answers into segments, "
        "or hand the nodes that are done to another job"
    )
    if tokens.len() < MIN_REQUESTS:
        return f"lower the maximum response length if scores allow; else {otherwise}"
    longest, most = int(tokens.max()), int(tokens.quantile(0.95, "nearest"))
    capped = (tokens == longest).mean()
    cut = f"the longest answers have {longest} tokens ({100 * capped:.1f} % of all are that long), 95 % have {most} or fewer"
    if most >= 0.9 * longest:
        return f"{cut}, so a lower limit would cut many: {otherwise}"
    return f"{cut}: try a maximum response length near {most} and watch the score; else {otherwise}"


def find_heavy_preprocessing(analysis: Analysis) -> list[Finding]:
    """One finding a job, when its median step spends HEAVY or more of its time on preprocessing."""
    rows = analysis.step_shares.filter((pl.col("event") == events.PREPROCESSING) & (pl.col("role") == "rollout"))
    findings = []
    for (job,), steps in rows.group_by("job", maintain_order=True):
        share = float(steps["share"].median())
        if share < HEAVY:
            continue
        worst = steps.sort("seconds", descending=True).row(0, named=True)
        seconds = float(steps["seconds"].mean())
        text = f"preprocessing took {100 * share:.1f} % of the step, {seconds:.1f} s"
        findings.append(
            Finding(
                "preprocessing", job, worst["step"], _slowest_worker(analysis, job, worst["step"]), seconds, text,
                PREPROCESS_ADVICE, cost_s=float(steps["seconds"].sum()), evidence={"share": round(share, 4)},
            )
        )  # fmt: skip
    return findings


def find_slow_preparation(analysis: Analysis) -> list[Finding]:
    """The same for logs that time it by request (`turn_pre_process`): HEAVY or more of requests' time in the median step."""
    done = analysis.finished.filter(pl.col("stays") > 0)
    steps = done.group_by("job", "step", maintain_order=True).agg(
        pl.col("preprocess").sum().alias("spent"), pl.col("seconds").sum(), pl.col("preprocess").median().alias("each"),
        pl.col("worker").sort_by("preprocess").last(),
    ).with_columns(share=pl.col("spent") / pl.col("seconds"))  # fmt: skip
    findings = []
    for (job,), rows in steps.group_by("job", maintain_order=True):
        share = float(rows["share"].median() or 0.0)
        if share < HEAVY:
            continue
        worst = rows.sort("each", descending=True).row(0, named=True)
        text = f"preparing its turns took {100 * share:.1f} % of a request's time, {worst['each']:.1f} s in step {worst['step']}"
        findings.append(
            Finding(
                "preprocessing", job, worst["step"], worst["worker"], worst["each"], text, PREPROCESS_ADVICE,
                cost_s=float(rows["each"].sum()), evidence={"share": round(share, 4)},
            )
        )  # fmt: skip
    return findings


def _slowest_worker(analysis: Analysis, job: str, step: int) -> int:
    here = (pl.col("job") == job) & (pl.col("step") == step) & (pl.col("event") == events.PREPROCESSING)
    return analysis.run.tables.totals.filter(here).sort("seconds", "worker", descending=[True, False])["worker"][0]
