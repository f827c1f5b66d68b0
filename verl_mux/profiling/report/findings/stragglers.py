"""Findings about what the others of a step waited for: `straggler`, `slow_engines`, `uneven_load`, `long_tail`,
`preprocessing`.

A straggler is a replica, or all replicas of a node, that took longer for each token than those on other nodes (than all others
where there is one node). More requests at once make a token slower too, but not the replica: its tokens a second must be fewer
as well. Replicas that stood still or were short of KV cache in a step are left to those findings. Where the log knows no
engines, each worker is taken for one, by the time of its engine calls; a worker's requests as wholes say nothing of it once
some were cut off. Runs in the report; called by output/summary.py; pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.findings.finding import Finding, Place, over_steps
from verl_mux.profiling.report.measures.analysis import (
    UNIT,
    Analysis,
    Engines,
    busy,
    completion,
    log_spread,
    log_spread_of,
    middle,
)

SLOWER = 1.5  # times its peers
DEVIATIONS = 5.0
MIN_SPREAD = 0.05  # of the logarithm: peers closer than that differ by chance
FEW_SPREAD = 0.35  # the same over the root of how many requests there are: a handful says little of its own spread
COST = 0.10  # of the step
MIN_STAYS = 4
MIN_OF_WORKER, MIN_WORKERS = 8, 3
THROUGHPUT = 0.85  # of its peers' tokens a second
ENGINE_ADVICE = (
    "a token took {ratio:.1f} times as long on {place} as on {others}, with no more requests at once: compare clocks, power and "
    "temperature, other users of the GPUs and of the host's cores and memory, and links; until then take it out of the pool"
)


def paces(analysis: Analysis) -> pl.DataFrame:
    """A row a job, step and unit: stays, pace (seconds a token), spread (of its logarithm), tokens, rate (a second), start, end,
    usual (seconds of work)."""
    enough = pl.when(pl.col("job").is_in(list(analysis.engines.jobs))).then(MIN_STAYS).otherwise(MIN_OF_WORKER)
    known, paces_of = pl.col("pace").is_not_null(), pl.col("pace").filter(pl.col("pace") > 0)
    found = analysis.worked.group_by(UNIT, maintain_order=True).agg(
        known.sum().alias("stays"), pl.col("pace").median(), log_spread_of(paces_of),
        pl.col("tokens").sum(), busy(), pl.col("start").min(), pl.col("end").filter(known).max(),
        pl.col("work").filter(known).median().alias("usual"),
    ).with_columns(rate=pl.col("tokens") / pl.col("busy").clip(1e-9))  # fmt: skip
    return found.filter((pl.col("stays") >= enough) & (pl.col("pace") > 0))


def find(analysis: Analysis, paced: pl.DataFrame, gaps: Collection[Place], starved: Collection[Place]) -> list[Finding]:
    """One finding a job and unit, at its worst step; one for all replicas of a node that were slow together."""
    engines, by_step = analysis.engines, defaultdict[tuple[str, int], list[dict[str, Any]]](list)
    for row in paced.iter_rows(named=True):
        place = (row["job"], row["step"], row["unit"])
        if place not in starved and place not in gaps:
            by_step[place[:2]].append(row)
    seen: dict[tuple[str, int], list[_Judged]] = defaultdict(list)
    for (job, _), rows in by_step.items():
        if job not in engines.jobs and len(rows) < MIN_WORKERS:
            continue
        step_s = max(row["end"] for row in rows) - min(row["start"] for row in rows)
        for row, others in _beside_others(rows, engines):
            seen[row["job"], row["unit"]].append(_judge(row, others, engines, step_s))
    slow = [_slow(steps) for steps in seen.values()]
    return _by_node([over_steps(found) for found in slow if found], engines)


class _Judged(NamedTuple):
    """A replica in a step beside its peers. log: of how many times slower it was. unsure: how far chance alone takes that.
    finding: where it was slower by enough, and it cost enough."""

    log: float
    stays: int
    unsure: float
    finding: Finding | None


def _slow(judged: list[_Judged]) -> list[Finding]:
    """A replica's findings: of the steps that are evidence by themselves, or of all where the steps together are."""
    stays = sum(it.stays for it in judged)
    mean = sum(it.log * it.stays for it in judged) / stays
    together = mean >= np.log(SLOWER) and mean >= DEVIATIONS * max(FEW_SPREAD / np.sqrt(stays), MIN_SPREAD)
    return [it.finding for it in judged if it.finding is not None and (together or it.log >= DEVIATIONS * it.unsure)]


def _beside_others(rows: list[dict[str, Any]], engines: Engines) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Each replica of a step, and the middle of its peers: those on other nodes; all others where there is one node."""
    node = [engines.node_of.get((row["job"], row["unit"])) for row in rows]
    apart: list[Any] = node if len(set(node)) > 1 else [row["unit"] for row in rows]
    peers = {at: [row for row, other in zip(rows, apart, strict=True) if other != at] for at in set(apart)}
    found = {at: _middle_of(others) for at, others in peers.items() if others}
    yield from ((row, found[at]) for row, at in zip(rows, apart, strict=True) if at in found)


def _middle_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """spread: of the logarithms of their paces, as a standard deviation."""
    usual = {key: middle([row[key] for row in rows]) for key in ("pace", "rate", "end")}
    return usual | {"spread": log_spread([row["pace"] for row in rows])}


def _judge(row: dict[str, Any], peers: dict[str, float], engines: Engines, step_s: float) -> _Judged:
    ratio, finding = row["pace"] / peers["pace"], None
    if ratio >= SLOWER and row["rate"] <= THROUGHPUT * peers["rate"]:
        lost = max(row["end"] - peers["end"], (1 - 1 / ratio) * row["usual"])
        finding = _engine_finding(row, lost, ratio, engines) if lost >= COST * step_s else None
    unsure = max(peers["spread"], max(FEW_SPREAD, row["spread"]) / np.sqrt(row["stays"]), MIN_SPREAD)
    return _Judged(float(np.log(ratio)), row["stays"], unsure, finding)


def _engine_finding(row: dict[str, Any], lost: float, ratio: float, engines: Engines) -> Finding:
    job, unit, pace = row["job"], row["unit"], row["pace"]
    where = engines.where(job, unit)
    name = f"replica {unit}" if where else f"the engine of worker {unit}"
    name += f" on {where['node']}" if where else ""
    text = f"{name} took {ratio:.1f} times as long for a token as its peers; it cost the step {lost:.1f} s"
    advice = ENGINE_ADVICE.format(ratio=ratio, place=name, others="its peers")
    evidence = {"times_slower": round(ratio, 3), "seconds_per_token": round(pace, 6), "of_peers": round(pace / ratio, 6)}
    return Finding("straggler", job, row["step"], None if where else unit, lost, text, advice, evidence=evidence, **where)


def _by_node(findings: list[Finding], engines: Engines) -> list[Finding]:
    """Where all of a node's replicas, two or more, were slow beside other nodes, the node is."""
    left, known = list(findings), []
    for job, node in sorted({(f.job, f.node) for f in findings if f.node is not None}):
        here = [f for f in left if (f.job, f.node) == (job, node)]
        of_node = {replica for (of, replica), on in engines.node_of.items() if (of, on) == (job, node)}
        alone = {on for (of, _), on in engines.node_of.items() if of == job} == {node}
        if alone or len(of_node) < 2 or {f.replica for f in here} != of_node:
            continue
        left = [f for f in left if f not in here]
        known.append(_node_finding(here))
    return left + known


def _node_finding(here: list[Finding]) -> Finding:
    worst = max(here, key=lambda finding: finding.seconds)
    replicas = sorted(f.replica for f in here if f.replica is not None)
    ratio = worst.evidence["times_slower"]
    text = (
        f"node {worst.node}: all its replicas ({', '.join(map(str, replicas))}) took up to {ratio:.1f} times as long for a token"
    )
    steps = sorted({step for f in here for step in f.evidence["steps"]})
    return replace(
        worst, text=text, advice=ENGINE_ADVICE.format(ratio=ratio, place=f"node {worst.node}", others="other nodes"),
        cost_s=max(f.cost_s for f in here), evidence=worst.evidence | {"replicas": replicas, "steps": steps},
    )  # fmt: skip


MIN_STEPS = 4


def find_slow_engines(paced: pl.DataFrame, odd: Collection[Place]) -> list[Finding]:
    """One finding a job: steps in which all engines took longer for a token than in its better steps. Not the first, which warms
    them up; not steps with more requests at once, in which an engine gives more tokens a second; nor places that are `odd`."""
    found: list[Finding] = []
    places = pl.DataFrame(list(odd), {name: paced.schema[name] for name in UNIT}, orient="row")
    even = paced.join(places, on=UNIT, how="anti", maintain_order="left")
    for (job,), rows in even.group_by("job", maintain_order=True):
        steps = rows.group_by("step").agg(
            pl.col("pace", "rate", "usual").median(), pl.col("stays").sum(), pl.col("spread").median(), pl.len().alias("units"),
            whole=pl.col("end").max() - pl.col("start").min(),
        ).filter(pl.col("units") > 1).sort("step").rows(named=True)  # fmt: skip
        if len(steps) < MIN_STEPS:
            continue
        best = float(np.quantile([row["pace"] for row in steps], 0.25))
        rate = float(np.quantile([row["rate"] for row in steps], 0.75))
        for row in steps[1:]:
            unsure = max(max(FEW_SPREAD, row["spread"]) / np.sqrt(row["stays"]), MIN_SPREAD)
            ratio, lost = row["pace"] / best, (1 - best / row["pace"]) * row["usual"]
            if ratio >= max(SLOWER, np.exp(DEVIATIONS * unsure)) and row["rate"] <= rate / SLOWER and lost >= COST * row["whole"]:
                text = f"all engines took {ratio:.1f} times as long for a token in step {row['step']} as in better steps"
                advice = ENGINE_ADVICE.format(ratio=ratio, place="all engines", others="usual")
                evidence = {"times_slower": round(ratio, 3)}
                found.append(Finding("slow_engines", job, row["step"], None, lost, text, advice, evidence=evidence))
    return [over_steps([f for f in found if f.job == job]) for job in dict.fromkeys(f.job for f in found)]


UNEVEN, UNEVEN_ONCE = 1.6, 2.5  # times its peers' requests: over the run, and in a single step
IN_GROUPS = 4.0  # the samples of a prompt may go to one replica together, which spreads their counts more
UNEVEN_COST = 0.15
UNEVEN_ADVICE = "let each request go to the replica with the fewest running, not to one by its prompt's name"


def find_uneven_load(analysis: Analysis, odd: Collection[tuple[str, int | None]]) -> list[Finding]:
    """One finding a job and replica that was given far more requests than its peers and was done later, though it was not slower
    (`odd`: job and replica of those that were)."""
    stays, of_step = analysis.engines.stays, ["job", "step"]
    given = (
        stays.sort("start").unique(["job", "step", "request_id"], keep="first", maintain_order=True).group_by(UNIT).len("given")
    )
    rows = given.join(stays.group_by(UNIT).agg(pl.col("end").max(), pl.col("start").min()), on=UNIT).with_columns(
        pl.col("given").cast(pl.Int64), pl.len().over(of_step).alias("units"),
        whole=pl.col("end").max().over(of_step) - pl.col("start").min().over(of_step),
    )  # fmt: skip

    def of_peers(column: str) -> pl.Expr:
        """The middle of all, for it is hardly another one without the replica itself; the other one of two."""
        two = pl.col(column).sum().over(of_step) - pl.col(column)
        return pl.when(pl.col("units") == 2).then(two).otherwise(pl.col(column).median().over(of_step))

    rows = (
        rows.filter(pl.col("units") > 1).with_columns(usual=of_peers("given"), late=pl.col("end") - of_peers("end")).sort("step")
    )
    found = []
    for (job, unit), own in rows.group_by("job", "unit", maintain_order=True):
        bad = own.filter(pl.col("step").is_in(_given_more(own))) if (job, unit) not in odd else own.clear()
        if bad.height:
            found.append(_uneven(analysis, job, unit, bad))
    return sorted(found, key=lambda finding: (finding.job, finding.replica or 0))


def _given_more(own: pl.DataFrame) -> list[int]:
    """Steps in which the replica got too much; all that it was late in, where it did so over the run."""

    def far(times: float, given: float, others: float) -> bool:
        return given >= times * others and given - others >= DEVIATIONS * np.sqrt(IN_GROUPS * (others + 1))

    over = own.filter(pl.col("late") >= UNEVEN_COST * pl.col("whole"))
    if over.height * 2 >= own.height >= 2 and far(UNEVEN, own["given"].sum(), own["usual"].sum()):
        return over["step"].to_list()
    return [step for step, given, usual in over.select("step", "given", "usual").rows() if far(UNEVEN_ONCE, given, usual)]


def _uneven(analysis: Analysis, job: str, unit: int, bad: pl.DataFrame) -> Finding:
    worst = bad.sort("late").row(-1, named=True)
    where = analysis.engines.where(job, unit)
    text = (
        f"replica {unit} on {where['node']} was given {worst['given']} requests in step {worst['step']}, its peers "
        f"{worst['usual']:.0f}; it was done {worst['late']:.1f} s after them"
    )
    evidence = {"requests": worst["given"], "of_peers": worst["usual"], "steps": bad["step"].to_list()}
    cost = float(bad["late"].sum())
    return Finding(
        "uneven_load", job, worst["step"], None, worst["late"], text, UNEVEN_ADVICE, cost_s=cost, evidence=evidence, **where
    )


LONG_TAIL = 0.33  # four fifths of the requests were done within this part of the time
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
    known = steps.filter(pl.col("requests") >= MIN_REQUESTS)["part"]
    return known.is_empty() or bool(known.median() <= LONG_LENGTHS)


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


def find_preprocessing(analysis: Analysis) -> list[Finding]:
    """One finding a job whose median step spends HEAVY or more of its time on it: of the step, or of its requests' time in logs
    that time it by request (`turn_pre_process`)."""
    of_event = (pl.col("event") == events.PREPROCESSING) & (pl.col("role") == "rollout")
    findings = []
    for (job,), steps in analysis.step_shares.filter(of_event).group_by("job", maintain_order=True):
        worst, seconds = steps.sort("seconds", descending=True).row(0, named=True), float(steps["seconds"].mean())
        here = analysis.run.tables.totals.filter(
            (pl.col("job") == job) & (pl.col("step") == worst["step"]) & (pl.col("event") == events.PREPROCESSING)
        )
        worker = here.sort("seconds", "worker", descending=[True, False])["worker"][0]
        text = "preprocessing took {share:.1f} % of the step, {seconds:.1f} s"
        findings += _preprocessing(job, steps["share"], worst["step"], worker, seconds, float(steps["seconds"].sum()), text)
    done = analysis.finished.filter(pl.col("stays") > 0)
    by_request = done.group_by("job", "step", maintain_order=True).agg(
        pl.col("preprocess").sum().alias("spent"), pl.col("seconds").sum(), pl.col("preprocess").median().alias("each"),
        pl.col("worker").sort_by("preprocess").last(),
    ).with_columns(share=pl.col("spent") / pl.col("seconds"))  # fmt: skip
    for (job,), steps in by_request.group_by("job", maintain_order=True):
        worst = steps.sort("each", descending=True).row(0, named=True)
        text = "preparing its turns took {share:.1f} % of a request's time, {seconds:.1f} s in step {step}"
        findings += _preprocessing(
            job, steps["share"], worst["step"], worst["worker"], worst["each"], float(steps["each"].sum()), text
        )
    return findings


def _preprocessing(job: str, shares: pl.Series, step: int, worker: int, seconds: float, cost: float, text: str) -> list[Finding]:
    share = float(shares.median() or 0.0)
    if share < HEAVY:
        return []
    about = text.format(share=100 * share, seconds=seconds, step=step)
    evidence = {"share": round(share, 4)}
    return [Finding("preprocessing", job, step, worker, seconds, about, PREPROCESS_ADVICE, cost_s=cost, evidence=evidence)]
