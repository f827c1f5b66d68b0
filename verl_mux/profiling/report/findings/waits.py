"""Findings about time in which requests, or the whole job, waited: in the engines' queues, for tools, rewards and leases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.findings.completion_gaps import Place
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.findings.outliers import chance
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.measures.engines import was_let_in
from verl_mux.profiling.report.measures.leases import Leases, Wait

QUEUED = 0.35  # of the time of stays
MIN_REQUESTS = 8
# Of the requests' time, and of the steps' time that would be saved if none waited longer than the usual one.
SHARES = {"tool": 0.40, "reward": 0.25}
COST, COST_OF_STEP = 0.15, 0.10
# One call in thousands is long, and now and then it is a step's last: what the other steps' calls would hold is no finding.
BY_CHANCE = 1e-4
LEAST_S = 1.0  # any process pauses for some tenths of a second now and then
TIMES = 3.0  # in a step in which calls took longer than usual
LEASES = 0.5  # of the steps' time
UNEQUAL = 2.0
# Times the usual wait; and half a usual step more than it, or than a phase of those it was behind; and half of its own step.
LONG_WAIT = 4.0
MIN_STEPS = 2

QUEUE_ADVICE = (
    "let the engines run more requests at once (`max_running_requests`, memory fraction), add replicas, or over-sample less; "
    "where one replica queues and others do not, let requests go to the least loaded one"
)
ADVICE = {
    "tool": "give tool calls a timeout, run more of them at once, cache their results, or start them during the turn",
    "reward": "compute rewards in more processes (`reward.num_workers`), give them a timeout, let them overlap the next samples",
}
LEASE_ADVICE = (
    "put fewer or better fitting jobs into the co-execution group (`verl-mux plan` says which fit), or give the one that "
    "all wait for nodes of its own"
)


def find_queueing(analysis: Analysis, starved: set[Place]) -> list[Finding]:
    """One finding a job and replica: QUEUED or more of its stays' time went by in its queue, though there was KV cache."""
    seen: dict[tuple[str, int], list[Finding]] = {}
    parts = {place: part for place, part in analysis.engines.queue_parts.items() if part >= QUEUED and place not in starved}
    for (job, step, replica), stays in analysis.engines.by_place(parts).items():
        part, let_in = parts[job, step, replica], was_let_in(stays)
        last = let_in.sort("end").tail(max(1, let_in.height // 10))
        seconds = float(last["queue"].median())
        where = analysis.engines.where(job, replica)
        text = f"replica {replica} on {where['node']}: {100 * part:.0f} % of the time of its requests went by in its queue"
        found = Finding("queueing", job, step, None, seconds, text, QUEUE_ADVICE, evidence={"part": round(part, 4)}, **where)
        seen.setdefault((job, replica), []).append(found)
    return [_over_steps(found) for found in seen.values()]


def _over_steps(found: list[Finding]) -> Finding:
    worst = max(found, key=lambda finding: finding.seconds)
    steps = sorted(finding.step for finding in found if finding.step is not None)
    return replace(worst, cost_s=sum(f.seconds for f in found), evidence=worst.evidence | {"steps": steps})


def find_part(analysis: Analysis, slow: list[Finding], part: str) -> list[Finding]:
    """`tool_wait` or `reward_wait`: single requests (from `slow`), jobs whose requests spend too much on it, or too unevenly."""
    kind = f"{part}_wait"
    single = [finding for finding in slow if finding.kind == kind]
    told = {(finding.job, finding.step, finding.request_id) for finding in single}
    findings = list(single)
    for (job,), rows in analysis.finished.group_by("job", maintain_order=True):
        names = {request for of, _, request in told if of == job}
        rest = rows.filter(~pl.col("request_id").is_in(list(names)))
        if rest.height >= MIN_REQUESTS and (rest[part] > 0).any():
            findings += _of_job(job, rest, kind, part, _each(analysis, job, part, names), job not in analysis.unawaited)
    return findings


def _each(analysis: Analysis, job: str, part: str, without: set[str | None]) -> pl.DataFrame:
    """By step: what requests spent on the part in that very step, seconds; not those that have a finding. `each`: the median;
    `upper`: the upper quartile, for a slow tool among several is no part of most requests; `least`: that of the step in which it
    is least, because what breaks early and stays is in most steps."""
    rows = analysis.run.tables.requests.filter((pl.col("job") == job) & (pl.col(part) > 0) & ~pl.col("validate"))
    steps = rows.filter(~pl.col("request_id").is_in(list(without))).group_by("step").agg(
        each=pl.col(part).median(), upper=pl.col(part).quantile(0.75, "nearest"), calling=pl.len()
    )  # fmt: skip
    known = pl.when(pl.col("calling") >= MIN_REQUESTS).then("upper")
    return steps.select("step", "each", "upper", least=pl.coalesce(known.min(), pl.col("upper").min()))


def _of_job(job: str, rows: pl.DataFrame, kind: str, part: str, each: pl.DataFrame, awaited: bool) -> list[Finding]:
    """awaited: steps end with their last request. Where they do not, a call delays its own request alone, so it is measured by
    what requests take."""
    usual = float(each["each"].quantile(0.25, "lower"))
    without = (pl.col("end") - (pl.col(part) - usual).clip(0.0)).max()
    steps = rows.group_by("step").agg(
        spent=pl.col(part).sum(), seconds=pl.col("seconds").sum(), mean=pl.col("seconds").mean(),
        total=pl.col("end").max() - pl.col("start").min(),
        cost=pl.col("end").max() - without, middle=pl.col(part).median(), worst=pl.col("request_id").sort_by(part).last(),
        worker=pl.col("worker").sort_by(part).last(),
    ).join(each, on="step", how="left").sort("step")  # fmt: skip
    more = (pl.col("upper") - pl.col("least")).fill_null(0.0)
    share = float(steps["spent"].sum()) / max(float(steps["seconds"].sum()), 1e-9)
    uneven = float(steps["cost"].sum()) / max(float(steps["total"].sum()), 1e-9)
    longer = pl.col("upper").fill_null(0.0) >= TIMES * pl.col("least")
    unlike = longer & (more >= COST_OF_STEP * pl.col("total" if awaited else "mean"))
    costly = steps.filter(pl.col("cost") >= (COST_OF_STEP * pl.col("total")).clip(LEAST_S))
    costly = pl.col("step").is_in(_not_by_chance(rows, part, costly))
    bad = steps.filter(unlike | costly | (pl.col("spent") >= SHARES[part] * pl.col("seconds")))
    if bad.is_empty() and (share >= SHARES[part] or uneven >= COST):
        bad = steps
    if bad.is_empty():
        return []
    cost = pl.max_horizontal(
        "cost",
        pl.when(unlike).then(more).otherwise(0.0),
        pl.when(pl.col("spent") >= SHARES[part] * pl.col("seconds")).then("middle").otherwise(0.0),
    )
    bad = bad.with_columns(cost.alias("cost"))
    worst = bad.sort("cost", descending=True).row(0, named=True)
    text = (
        f"{part} calls took {100 * share:.0f} % of the requests' time; in step {worst['step']} they cost {worst['cost']:.1f} s "
        f"of {worst['total']:.1f} s"
    )
    evidence = {"share": round(share, 4), "steps": bad["step"].to_list()}
    return [
        Finding(
            kind, job, worst["step"], worst["worker"], worst["cost"], text, ADVICE[part],
            request_id=worst["worst"], cost_s=float(bad["cost"].sum()), evidence=evidence,
        )
    ]  # fmt: skip


def _not_by_chance(rows: pl.DataFrame, part: str, costly: pl.DataFrame) -> list[int]:
    """Of these steps, those whose calls are longer than the calls of the other steps would have some of them be."""
    calls = rows.filter(pl.col(part) > 0)
    others = calls.filter(~pl.col("step").is_in(costly["step"].to_list()))[part].to_numpy()
    by_step = {step: calls.filter(pl.col("step") == step)[part].to_numpy() for step in costly["step"]}
    return [step for step, mine in by_step.items() if chance(mine, others) < BY_CHANCE]


def find_lease_wait(analysis: Analysis) -> list[Finding]:
    """One finding a job that waited for leases LEASES of its steps' time or more, and UNEQUAL times as much as any other job did:
    equal jobs in turns wait alike. Or that waited once far longer than it does."""
    steps = analysis.spans.filter((pl.col("event") == events.STEP) & (pl.col("role") == "trainer"))
    waits_of = {job: _Waits(job, rows, analysis.leases) for (job,), rows in steps.group_by("job", maintain_order=True)}
    findings = []
    for job, mine in waits_of.items():
        if len(mine.steps) < MIN_STEPS or not mine.waits:
            continue
        others = max((it.share for other, it in waits_of.items() if other != job), default=0.0)
        bad = list(mine.spent) if mine.share >= max(LEASES, UNEQUAL * others) else mine.long()
        if bad:
            findings.append(_lease_finding(job, bad, mine.spent, mine.waits))
    return findings


class _Waits:
    """A job's waits for leases in its steps.

    steps, spent: seconds of each step, and those of them that it waited. in_turn: of these, what one usual phase of each job
    that it waited behind took: so long waits who comes when they have just begun.
    """

    def __init__(self, job: str, rows: pl.DataFrame, leases: Leases) -> None:
        self.steps = dict(rows.select("step", "seconds").iter_rows())
        self.waits = [w for w in leases.waits if w.job == job and w.phase != "init" and w.step in self.steps]
        self.spent: dict[int, float] = dict.fromkeys(self.steps, 0.0)
        self.in_turn = dict.fromkeys(self.steps, 0.0)
        for wait in self.waits:
            self.spent[wait.step] += wait.end - wait.start
            self.in_turn[wait.step] += sum(min(t, leases.usual_hold(of, wait.nodes)) for of, t in wait.behind.items())
        self.share = float(np.median([self.spent[s] / max(seconds, 1e-9) for s, seconds in self.steps.items()]))

    def long(self) -> list[int]:
        """Steps in which it waited far longer than it does. Not the first: jobs that begin together have to find their turns."""
        step, wait = float(np.median(list(self.steps.values()))), float(np.median(list(self.spent.values())))
        usual = {s: LEASES * step + max(wait, self.in_turn[s]) for s in self.spent}
        least = {s: max(LONG_WAIT * wait, usual[s], LEASES * self.steps[s]) for s in self.spent}
        return [s for s, t in self.spent.items() if s > min(self.steps) and t >= least[s]]


def _lease_finding(job: str, bad: list[int], spent: dict[int, float], waits: list[Wait]) -> Finding:
    worst = max(bad, key=spent.__getitem__)
    behind: dict[str, float] = {}
    for wait in (wait for wait in waits if wait.step in bad):
        for other, seconds in wait.behind.items():
            behind[other] = behind.get(other, 0.0) + seconds
    nodes = sorted({node for wait in waits if wait.step == worst for node in wait.nodes})
    text = f"job {job} waited {spent[worst]:.1f} s for leases in step {worst}"
    if behind:
        text += f", most of all behind {max(behind, key=behind.__getitem__)}"
    return Finding(
        "lease_wait", job, worst, None, spent[worst], text, LEASE_ADVICE, node=nodes[0] if len(nodes) == 1 else None,
        cost_s=sum(spent[step] for step in bad),
        evidence={"behind": {job: round(seconds, 3) for job, seconds in behind.items()}, "steps": sorted(bad), "nodes": nodes},
    )  # fmt: skip
