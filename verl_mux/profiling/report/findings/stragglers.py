"""Findings about what the others of a step waited for: `straggler`, `long_tail`, `preprocessing`.

Where the log knows engines, a straggler is a replica, or all replicas of a node, that took longer for each token than those on
other nodes (than all others where there is one node). More requests at once make a token slower too, but not the replica: its
tokens a second must be fewer as well. Replicas that stood still or were short of KV cache in a step are left to those findings.
Where the log knows no engines, a straggler is a worker whose requests all took longer than those of its peers. Runs in the
report; called by output/summary.py; pure.
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
from verl_mux.profiling.report.measures.analysis import Analysis, Engines, busy, completion, middle

SLOWER = 1.5  # times its peers
DEVIATIONS = 5.0
MIN_OF_WORKER = 8
MIN_WORKERS = 3
MIN_SPREAD = 0.05  # of the logarithm: peers closer than that differ by chance
FEW_SPREAD = 0.35  # the same over the root of how many requests there are: a handful says little of its own spread
COST = 0.10  # of the step
WORKER_ADVICE = (
    "its requests took {ratio:.1f} times as long as elsewhere: {reason}; compare this worker's clocks, neighbours and "
    "prefix cache, and let replicas pull requests as they finish instead of a fixed share each"
)


def find_workers(analysis: Analysis, ordinary: pl.DataFrame) -> list[Finding]:
    """One finding a job and worker, at its worst step, with all the steps it happened in."""
    seen: dict[tuple[str, int | None], list[Finding]] = defaultdict(list)
    ordinary = ordinary.filter(~pl.col("job").is_in([*analysis.engines.jobs, *analysis.unawaited]))
    for finding in _slow_workers(ordinary):
        seen[finding.job, finding.worker].append(finding)
    return [over_steps(found) for found in seen.values()]


def _slow_workers(ordinary: pl.DataFrame) -> Iterator[Finding]:
    for (job, step), frame in ordinary.group_by("job", "step", maintain_order=True):
        by_worker = frame.group_by("worker", maintain_order=True)
        workers = {worker: rows for (worker,), rows in by_worker if rows.height >= MIN_OF_WORKER}
        if len(workers) < MIN_WORKERS:
            continue
        whole = max(rows["end"].max() - rows["start"].min() for rows in workers.values())
        bulk = {worker: _bulk_end(rows) for worker, rows in workers.items()}
        for worker, (seconds, noise) in bulk.items():
            others = [value for other, (value, _) in bulk.items() if other != worker]
            ratio, lost = _slower(seconds, others, noise), seconds - middle(others)
            if ratio and lost >= COST * whole:
                text = f"worker {worker} was {ratio:.1f} times slower than its peers; they waited {lost:.1f} s for it"
                advice = WORKER_ADVICE.format(ratio=ratio, reason=_reason(workers, worker))
                yield Finding("straggler", job, step, worker, lost, text, advice, evidence={"times_slower": round(ratio, 3)})


def _bulk_end(rows: pl.DataFrame) -> tuple[float, float]:
    """When nine tenths of a worker's requests were done, in seconds, and the spread of its logarithm by chance."""
    ends = np.sort(rows["end"].to_numpy() - rows["start"].min())
    count = len(ends)
    reach = 2 * np.sqrt(0.09 * count)
    low, at, high = (ends[int(np.clip(np.ceil(0.9 * count + d) - 1, 0, count - 1))] for d in (-reach, 0, reach))
    spread = float(np.log(max(high, 1e-9) / max(low, 1e-9))) / 4
    return float(at), max(spread, FEW_SPREAD / np.sqrt(count))


def _slower(value: float, others: list[float], noise: float) -> float | None:
    """How many times slower than its peers, or None when that may be chance."""
    usual = middle(others)
    if usual <= 0 or value < SLOWER * usual:
        return None
    logs = np.log(np.maximum(others, 1e-9))
    spread = 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
    far = np.log(value / usual) >= DEVIATIONS * max(spread, noise, MIN_SPREAD)
    return value / usual if far and value > max(others) else None


def _reason(workers: dict[int, pl.DataFrame], worker: int) -> str:
    tokens = {w: rows["tokens"].median() for w, rows in workers.items()}
    others = [value for w, value in tokens.items() if w != worker and value]
    if tokens[worker] is None or not others:
        return "the log has no token counts to say whether its answers were longer"
    times = tokens[worker] / float(np.median(others))
    if times > 1.25:
        return f"its answers were {times:.1f} times as long, so share out the long prompts"
    return "its answers were no longer, so its engine was slower"


MIN_STAYS = 4
THROUGHPUT = 0.85  # of its peers' tokens a second
ENGINE_ADVICE = (
    "a token took {ratio:.1f} times as long on {place} as on {others}, with no more requests at once: compare clocks, power and "
    "temperature, other users of the GPUs and of the host's cores and memory, and links; until then take it out of the pool"
)


def find_engines(analysis: Analysis, gaps: Collection[Place], starved: Collection[Place]) -> list[Finding]:
    """One finding a job and replica, at its worst step; one for all replicas of a node that were slow together."""
    engines, known = analysis.engines, pl.col("pace").is_not_null()
    paces = engines.stays.group_by("job", "step", "replica", maintain_order=True).agg(
        known.sum().alias("stays"), pl.col("pace").median(), pl.col("tokens").sum(), busy(),
        pl.col("end").filter(known).max(), pl.col("work").filter(known).median().alias("usual"),
    ).filter(pl.col("stays") >= MIN_STAYS).with_columns(rate=pl.col("tokens") / pl.col("busy").clip(1e-9))  # fmt: skip
    by_step: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in paces.iter_rows(named=True):
        place = (row["job"], row["step"], row["replica"])
        if place not in starved and place not in gaps:
            by_step[place[:2]].append(row)
    seen: dict[tuple[str, int], list[_Judged]] = defaultdict(list)
    for rows in by_step.values():
        for row, others in _beside_others(rows, engines):
            if (judged := _judge(row, others, engines)) is not None:
                seen[row["job"], row["replica"]].append(judged)
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
    node = [engines.node_of.get((row["job"], row["replica"])) for row in rows]
    apart: list[Any] = node if len(set(node)) > 1 else [row["replica"] for row in rows]
    peers = {at: [row for row, other in zip(rows, apart, strict=True) if other != at] for at in set(apart)}
    found = {at: _middle_of(others) for at, others in peers.items() if others}
    yield from ((row, found[at]) for row, at in zip(rows, apart, strict=True) if at in found)


def _middle_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """spread: of the logarithms of their paces, as a standard deviation."""
    usual = {key: middle([row[key] for row in rows]) for key in ("pace", "rate", "end")}
    logs = np.log(np.maximum([row["pace"] for row in rows], 1e-9) / max(usual["pace"], 1e-9))
    return usual | {"spread": 1.4826 * float(np.median(np.abs(logs)))}


def _judge(row: dict[str, Any], peers: dict[str, float], engines: Engines) -> _Judged | None:
    if row["pace"] <= 0 or peers["pace"] <= 0:
        return None
    ratio, finding = row["pace"] / peers["pace"], None
    if ratio >= SLOWER and row["rate"] <= THROUGHPUT * peers["rate"]:
        lost = max(row["end"] - peers["end"], (1 - 1 / ratio) * row["usual"])
        began, ended = engines.steps[row["job"], row["step"]]
        finding = _engine_finding(row, lost, ratio, engines) if lost >= COST * (ended - began) else None
    unsure = max(peers["spread"], FEW_SPREAD / np.sqrt(row["stays"]), MIN_SPREAD)
    return _Judged(float(np.log(ratio)), row["stays"], unsure, finding)


def _engine_finding(row: dict[str, Any], lost: float, ratio: float, engines: Engines) -> Finding:
    job, replica, pace = row["job"], row["replica"], row["pace"]
    where = f"replica {replica} on {engines.node_of.get((job, replica))}"
    text = f"{where} took {ratio:.1f} times as long for a token as its peers; it cost the step {lost:.1f} s"
    advice = ENGINE_ADVICE.format(ratio=ratio, place=f"replica {replica}", others="its peers")
    evidence = {"times_slower": round(ratio, 3), "seconds_per_token": round(pace, 6), "of_peers": round(pace / ratio, 6)}
    return Finding("straggler", job, row["step"], None, lost, text, advice, evidence=evidence, **engines.where(job, replica))


def _by_node(findings: list[Finding], engines: Engines) -> list[Finding]:
    """Where all of a node's replicas, two or more, were slow beside other nodes, the node is."""
    left, known = list(findings), []
    for job, node in {(f.job, f.node) for f in findings if f.node is not None}:
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
