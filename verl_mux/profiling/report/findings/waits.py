"""Findings about time in which requests or the whole job waited: for engines, KV cache, tools, rewards, leases, other pools'
work. Runs in the report; called by output/summary.py; pure.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import length
from verl_mux.profiling.report.findings.finding import Finding, Place, chance, named, over_steps
from verl_mux.profiling.report.measures.analysis import Analysis, log_spread_of, middle, was_let_in
from verl_mux.profiling.report.measures.lease_times import Hold, Leases, shared_window

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


def find_queueing(analysis: Analysis, starved: Collection[Place]) -> list[Finding]:
    """One finding a job and replica: QUEUED or more of its stays' time went by in its queue, though there was KV cache."""
    seen: dict[tuple[str, int], list[Finding]] = defaultdict(list)
    parts = {place: part for place, part in analysis.engines.queue_parts.items() if part >= QUEUED and place not in starved}
    for (job, step, replica), stays in analysis.engines.by_place(parts).items():
        part, let_in = parts[job, step, replica], was_let_in(stays)
        last = let_in.sort("end").tail(max(1, let_in.height // 10))
        seconds = float(last["queue"].median())
        where = analysis.engines.where(job, replica)
        text = f"replica {replica} on {where['node']}: {100 * part:.0f} % of the time of its requests went by in its queue"
        found = Finding("queueing", job, step, None, seconds, text, QUEUE_ADVICE, evidence={"part": round(part, 4)}, **where)
        seen[job, replica].append(found)
    return [over_steps(found) for found in seen.values()]


def find_part(analysis: Analysis, slow: list[Finding], part: str) -> list[Finding]:
    """`tool_wait` or `reward_wait`: single requests (from `slow`), jobs whose requests spend too much on it, or too unevenly."""
    kind = f"{part}_wait"
    single = [finding for finding in slow if finding.kind == kind]
    seen = named(single).rows()
    findings = list(single)
    for (job,), rows in analysis.finished.group_by("job", maintain_order=True):
        names = {name for of, _, name in seen if of == job}
        rest = rows.filter(~pl.col("request_id").is_in(list(names)))
        if rest.height >= MIN_REQUESTS and (rest[part] > 0).any():
            findings += _of_job(
                analysis.run.tables.calls, job, rest, kind, part, _each(analysis, job, part, names), job not in analysis.unawaited
            )
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


def _of_job(
    calls: pl.DataFrame, job: str, rows: pl.DataFrame, kind: str, part: str, each: pl.DataFrame, awaited: bool
) -> list[Finding]:
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
    if kind == "tool_wait" and (tool := _worst_tool(calls.filter(pl.col("job") == job), evidence["steps"])):
        evidence, text = evidence | {"tool": tool}, f"{text}; most of it tool {tool}"
    return [
        Finding(
            kind, job, worst["step"], worst["worker"], worst["cost"], text, ADVICE[part],
            request_id=worst["worst"], cost_s=float(bad["cost"].sum()), evidence=evidence,
        )
    ]  # fmt: skip


def _worst_tool(calls: pl.DataFrame, steps: list[int]) -> str | None:
    """The tool that took most beyond its best step, in these steps."""
    each = calls.drop_nulls("tool").group_by("tool", "step").agg(pl.col("seconds").median(), pl.len().alias("n"))
    more = pl.col("n") * (pl.col("seconds") - pl.when(pl.col("step").is_in(steps).all().over("tool")).then(0.0).otherwise(
        pl.col("seconds").min().over("tool")))  # fmt: skip
    worst = each.with_columns(more.alias("more")).filter(pl.col("step").is_in(steps)).group_by("tool").agg(pl.col("more").sum())
    return worst.sort("more", "tool")["tool"][-1] if worst.height else None


def _not_by_chance(rows: pl.DataFrame, part: str, costly: pl.DataFrame) -> list[int]:
    """Of these steps, those whose longest calls the other steps' calls do not explain."""
    calls = rows.filter(pl.col(part) > 0)
    others = calls.filter(~pl.col("step").is_in(costly["step"].to_list()))[part].to_numpy()
    by_step = {step: calls.filter(pl.col("step") == step)[part].to_numpy() for step in costly["step"]}
    return [step for step, values in by_step.items() if chance(values, others) < BY_CHANCE]


OF_ENGINES = ("the job's lease, in its engine,", "the way to an engine")  # parts of a stay
PARTS = {
    "preparing turns": (["pending", "preprocess"], "preprocessing"),
    "the simulated user": (["interaction"], "slow_part"),
    "what follows the answer": (["postprocess", "tool_parse", "tool_response", "finalize"], "slow_part"),
    "what no event tells": (["other"], "slow_part"),
    "rewards": (["reward"], "reward_wait"),
}
MIN_CALLS = 4  # of a worker in a step
CALLS_SPREAD = 0.2  # of the logarithm, at least
SURE = 5.0  # deviations of a median
PART_ADVICE = (
    "compare this {place} with the others: what else ran in its processes then, what it called, what held its event loop"
)


def find_uneven_parts(analysis: Analysis, gaps: Collection[Place], known: list[Finding]) -> list[Finding]:
    """One finding a job and part of a request's time (a tool by its name) that took TIMES as long in a step as in its best, or on
    a worker as on the others; not what `known` findings tell of that step already."""
    found_there = {(f.job, f.kind, step) for f in known for step in f.evidence.get("steps", [f.step])}
    found_there |= {(job, "slow_part", step) for job, step, _ in gaps}
    rows, found = _part_rows(analysis), []
    steps = analysis.by_step.select("job", "step", "total")
    mean = analysis.finished.group_by("job", "step").agg(pl.col("seconds").mean().alias("mean"))
    late = pl.when(pl.col("job").is_in(list(analysis.unawaited))).then("mean").otherwise("total")
    whole = {
        (job, step): seconds for job, step, seconds in steps.join(mean, on=["job", "step"]).select("job", "step", late).rows()
    }
    for (job, what, kind), calls in rows.group_by("job", "what", "kind", maintain_order=True):
        by_step = _medians(calls, ["step"], MIN_REQUESTS)
        by_worker = _medians(calls, ["step", "worker"], MIN_CALLS)
        found += _uneven(job, what, kind, list(_beside_best(by_step)), whole, found_there)
        found += _uneven(job, what, kind, list(_beside_workers(by_worker)), whole, found_there)
    return [_of_engine(analysis, finding) if finding.evidence["part"] in OF_ENGINES else finding for finding in found]


def _of_engine(analysis: Analysis, finding: Finding) -> Finding:
    text = finding.text.replace("a request on worker", "a stay on replica")
    return replace(finding, text=text, **{"worker": None, **analysis.engines.where(finding.job, finding.worker)})


def _part_rows(analysis: Analysis) -> pl.DataFrame:
    """job, step, worker, what, kind, seconds: of each request in its step, for each part that it has."""
    key, finished = ["job", "step", "worker"], analysis.finished
    # What a request does before its answer is of that step, what follows of its last step. Lost lines explain nothing.
    raw = analysis.run.tables.requests.filter(~pl.col("validate"))
    with_all_lines = finished.filter((pl.col("engine") > 0) & (not analysis.run.faults.skipped))
    of = {"what no event tells": with_all_lines, "what follows the answer": finished}
    frames = [
        of.get(what, raw).select(
            *key, pl.lit(what).alias("what"), pl.lit(kind).alias("kind"), pl.sum_horizontal(parts).alias("seconds")
        ) for what, (parts, kind) in PARTS.items()
    ]  # fmt: skip
    held, way = (OF_ENGINES[0], "lease_wait", pl.col("held")), (OF_ENGINES[1], "slow_part", pl.col("way"))
    frames += [
        analysis.engines.stays.select(
            "job", "step", pl.col("replica").alias("worker"), what=pl.lit(what), kind=pl.lit(kind), seconds=spent
        ) for what, kind, spent in (held, way)
    ]  # fmt: skip
    tools = analysis.run.tables.calls.with_columns(
        what=pl.format("tool {}", pl.col("tool").fill_null("call")), kind=pl.lit("tool_wait")
    )
    return pl.concat([*frames, tools.select(*key, "what", "kind", "seconds")]).filter(pl.col("seconds") > 0)


def _medians(calls: pl.DataFrame, by: list[str], least: int) -> list[dict]:
    each = calls.group_by(by).agg(pl.len().alias("calls"), pl.col("seconds").median(), log_spread_of(pl.col("seconds")))
    return each.filter(pl.col("calls") >= least).sort(by).rows(named=True)


def _is_longer(row: dict, usual: float) -> bool:
    unsure = SURE * max(row["spread"], CALLS_SPREAD) * 1.25 / row["calls"] ** 0.5
    return row["seconds"] >= TIMES * usual and math.log(row["seconds"] / usual) >= unsure


def _beside_best(steps: list[dict]) -> Iterator[tuple[dict, float]]:
    """Rows of steps that took longer, and what is usual: what breaks early and stays is in most steps."""
    best = min((row["seconds"] for row in steps), default=0.0)
    yield from ((row | {"worker": None}, best) for row in steps if _is_longer(row, best))


def _beside_workers(places: list[dict]) -> Iterator[tuple[dict, float]]:
    for _, here in itertools.groupby(places, key=lambda row: row["step"]):
        rows = list(here)
        most = max(rows, key=lambda row: row["seconds"])
        others = [row["seconds"] for row in rows if row is not most]
        if len(others) >= 2 and most["seconds"] > max(others) and _is_longer(most, middle(others)):
            yield most, middle(others)


def _uneven(job: str, what: str, kind: str, longer: list[tuple[dict, float]], whole: dict, found_there: set) -> list[Finding]:
    by_worker: dict[int | None, list[Finding]] = defaultdict(list)
    for row, usual in longer:
        step, more = row["step"], row["seconds"] - usual
        if more < max(COST_OF_STEP * whole.get((job, step), math.inf), LEAST_S) or (job, kind, step) in found_there:
            continue
        place = f"worker {row['worker']}" if row["worker"] is not None else f"step {step}"
        text = f"{what} took {row['seconds']:.1f} s a request on {place}, {usual:.2g} s is usual"
        evidence = {"part": what, "requests": row["calls"]} | ({"tool": what[5:]} if kind == "tool_wait" else {})
        advice = PART_ADVICE.format(place=place.split()[0])
        by_worker[row["worker"]].append(Finding(kind, job, step, row["worker"], more, text, advice, evidence=evidence))
    return [over_steps(found) for found in by_worker.values()]


def find_lease_wait(analysis: Analysis) -> list[Finding]:
    """One finding a job that waited for leases LEASES of its steps' time or more, and UNEQUAL times as much as any other job did:
    equal jobs in turns wait alike. Or that waited once far longer than it does."""
    steps = analysis.spans.filter((pl.col("event") == events.STEP) & (pl.col("role") == "trainer"))
    waits_of = {job: _Waits(job, rows, analysis.leases) for (job,), rows in steps.group_by("job", maintain_order=True)}
    findings = []
    for job, own_waits in waits_of.items():
        if len(own_waits.steps) < MIN_STEPS or not own_waits.waits:
            continue
        others = max((waits.share for other, waits in waits_of.items() if other != job), default=0.0)
        bad = list(own_waits.spent) if own_waits.share >= max(LEASES, UNEQUAL * others) else own_waits.long()
        if bad:
            findings.append(_lease_finding(job, bad, own_waits.spent, own_waits.waits))
    return findings


class _Waits:
    """A job's waits for leases in its steps.

    steps, spent: seconds of each step, and those of them that it waited. in_turn: of these, what one usual phase of each job
    that it waited behind took: a job that comes when such a phase has just begun waits that long.
    """

    def __init__(self, job: str, rows: pl.DataFrame, leases: Leases) -> None:
        self.steps = dict(rows.select("step", "seconds").iter_rows())
        self.waits = [w for w in leases.waits if w.job == job and w.phase != "init" and w.step in self.steps]
        self.spent: dict[int, float] = dict.fromkeys(self.steps, 0.0)
        self.in_turn = dict.fromkeys(self.steps, 0.0)
        for wait in self.waits:
            self.spent[wait.step] += wait.seconds
            self.in_turn[wait.step] += sum(min(t, leases.usual_hold(other, wait.nodes)) for other, t in wait.behind.items())
        self.share = middle([self.spent[s] / max(seconds, 1e-9) for s, seconds in self.steps.items()])

    def long(self) -> list[int]:
        """Steps in which it waited far longer than it does. Not the first: jobs that begin together have to find their turns."""
        step, wait = middle(list(self.steps.values())), middle(list(self.spent.values()))
        least = {s: max(LONG_WAIT * wait, LEASES * step + max(wait, self.in_turn[s]), LEASES * self.steps[s]) for s in self.spent}
        return [s for s, t in self.spent.items() if s > min(self.steps) and t >= least[s]]


def _lease_finding(job: str, bad: list[int], spent: dict[int, float], waits: list[Hold]) -> Finding:
    worst = max(bad, key=spent.__getitem__)
    behind: dict[str, float] = defaultdict(float)
    for other, seconds in (item for wait in waits if wait.step in bad for item in wait.behind.items()):
        behind[other] += seconds
    nodes = sorted({node for wait in waits if wait.step == worst for node in wait.nodes})
    text = f"job {job} waited {spent[worst]:.1f} s for leases in step {worst}"
    if behind:
        text += f", most of all behind {max(behind, key=behind.__getitem__)}"
    return Finding(
        "lease_wait", job, worst, None, spent[worst], text, LEASE_ADVICE, node=nodes[0] if len(nodes) == 1 else None,
        cost_s=sum(spent[step] for step in bad),
        evidence={"behind": {job: round(seconds, 3) for job, seconds in behind.items()}, "steps": sorted(bad), "nodes": nodes},
    )  # fmt: skip


KV_ADVICE = (
    "raise the engine's memory fraction, lower the number of running requests or the maximum response length, "
    "or spread the requests over more replicas; what is thrown out is prefilled again"
)
POOL_ADVICE = (
    "move nodes from {empty} to {full}, or add a job that needs {empty} more than {full} (`verl-mux plan` says which fits)"
)
SWITCH_ADVICE = (
    "give each turn more work (larger train batch, more prompts a step), keep fewer jobs in the co-execution group, "
    "or leave tags on the device that fit beside the other jobs'"
)
# Of the time: how much busier one pool is than the other. Two jobs that share both leave a third of one idle by themselves where
# each needs the other pool half as long again.
UNEVEN = 0.45
THRASHING = 0.20  # of the phases' time
FULL = 0.95  # of the KV cache
# An engine admits a request only if its forecast of what running requests will still write leaves room, so requests may wait
# for a cache that is far from full.
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
        advice = POOL_ADVICE.format(full=full, empty=empty)
        evidence = {"busy": {pool: round(part, 4) for pool, part in busy.items()}, "segment": segment.index}
        last = max(hold.step for hold in leases.holds)
        findings.append(Finding("uneven_pools", "", last, 0, seconds, text, advice, evidence=evidence))
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
        where, evidence = (
            (worst["step"], worst["worker"], worst["seconds"]),
            {"part": round(spent / work, 4), "moves": rows.height},
        )
        findings.append(Finding("thrashing_switches", job, *where, text, SWITCH_ADVICE, cost_s=spent, evidence=evidence))
    return findings


def starved_places(analysis: Analysis) -> dict[tuple[str, int | None, int], dict[str, float]]:
    """(job, step, replica or worker) -> `reports`, `starved` of them, `out` (requests thrown out), `seconds` of it."""
    place, of_replica = ["job", "step", "worker"], ["job", "step", pl.col("replica").alias("worker")]
    span = pl.col("end").max() - pl.col("end").min()
    full = ((pl.col("token_usage") >= FULL) & (pl.col("queued") > 0)).fill_null(False)
    reports = analysis.engine_reports.group_by(place).agg(
        reports=pl.len(), starved=full.sum(), seconds=(span * full.mean()).fill_null(0.0)
    )  # fmt: skip
    held = analysis.engines.counters.with_columns(_held_back(analysis).alias("waits")).group_by(of_replica).agg(
        held=pl.col("waits").sum(), held_s=(span * pl.col("waits").mean()).fill_null(0.0)
    )  # fmt: skip
    thrown = analysis.spans.filter(pl.col("event") == events.ENGINE_RETRACT).group_by(place).agg(
        out=pl.col("requests").fill_null(1).sum(), out_s=span
    )  # fmt: skip
    stays = analysis.engines.stays.group_by(of_replica).agg(
        pl.len().alias("stays"), pl.col("retractions").sum().alias("retractions")
    )
    counted = analysis.engines.counters.group_by(of_replica).agg(pl.col("retracted").sum())
    queues = [key for key, part in analysis.engines.queue_parts.items() if part >= QUEUED]
    queueing = pl.DataFrame(queues, {name: reports.schema[name] for name in place}, orient="row").with_columns(queues=True)
    rows = reports.join(thrown, on=place, how="full", coalesce=True, nulls_equal=True)
    rows = rows.join(stays, on=place, how="full", coalesce=True, nulls_equal=True)
    for more in (held, counted, queueing):
        rows = rows.join(more, on=place, how="left")
    rows = rows.with_columns(pl.col("queues").fill_null(False), pl.exclude(*place, "queues").fill_null(0))
    # Counters show requests that wait for nothing but KV cache; they count only where stays queued too.
    by_forecast = pl.col("queues") & (pl.col("reports") > 0) & (pl.col("held") > pl.col("starved"))
    rows = rows.with_columns(
        starved=pl.when(by_forecast).then("held").otherwise("starved"),
        seconds=pl.max_horizontal(pl.when(by_forecast).then("held_s").otherwise("seconds"), "out_s"),
    )
    rows = rows.with_columns(out=pl.max_horizontal("out", "retracted", "retractions"))
    # Where stays queued, fewer reports are enough.
    enough = (pl.col("reports") >= MIN_REPORTS) | pl.col("queues") & (pl.col("starved") > 0)
    short = enough & (pl.col("starved") >= STARVED * pl.col("reports")) & (pl.col("reports") > 0)
    short |= pl.col("out") >= (THROWN_OUT * pl.col("stays")).clip(MIN_OUT)
    columns = ["reports", "starved", "out", "seconds"]
    found = rows.filter(short).select(*place, *columns).rows()
    return {row[:3]: dict(zip(columns, row[3:], strict=True)) for row in found}


def _held_back(analysis: Analysis) -> pl.Expr:
    """Of a row of the engines' counters: did requests wait for nothing but KV cache?"""
    keys = {job: analysis.keys(job).get("actor_rollout_ref.rollout.max_num_seqs", "") for job in analysis.engines.jobs}
    slots = {job: float(number) for job, number in keys.items() if number.isdigit()}  # requests that may run at once
    of_job = pl.col("job").replace_strict(slots, default=None, return_dtype=pl.Float64)
    most = pl.coalesce(of_job, pl.col("running").max().over("job"))
    rate = pl.col("prefill_tokens_per_sec").fill_null(0.0)
    waits = (pl.col("queued") > 0) & (pl.col("token_usage") >= FORECAST_FULL) & (pl.col("running") <= (1 - FREE_SLOTS) * most)
    return (waits & ~(rate > PREFILLING * rate.max().over("job", "replica"))).fill_null(False)


def find_kv_starvation(analysis: Analysis) -> list[Finding]:
    """One finding a job and replica whose KV cache was full while requests queued, or whose scheduler threw requests out."""
    by_engine: dict[tuple[str, int], list[tuple[int | None, dict[str, float]]]] = defaultdict(list)
    for (job, step, worker), figures in starved_places(analysis).items():
        by_engine[job, worker].append((step, figures))
    return [_starved(analysis, job, worker, found) for (job, worker), found in by_engine.items()]


def _starved(analysis: Analysis, job: str, worker: int, found: list[tuple[int | None, dict[str, float]]]) -> Finding:
    step, worst = max(found, key=lambda item: (item[1]["seconds"], item[1]["out"]))
    where = analysis.engines.where(job, worker)
    total = {key: sum(figures[key] for _, figures in found) for key in worst}
    place = f"replica {worker} on {where['node']}" if where else "the engine"
    text = f"{place}: requests waited for KV cache in {total['starved']} of {total['reports']} reports"
    if total["out"]:
        text += f"; {total['out']} running requests were thrown out"
    evidence = {"reports": total["starved"], "thrown_out": total["out"], "steps": sorted(s for s, _ in found if s is not None)}
    return Finding(
        "kv_starvation", job, step, None if where else worker, worst["seconds"], text, KV_ADVICE,
        cost_s=total["seconds"], evidence=evidence, **where,
    )  # fmt: skip
