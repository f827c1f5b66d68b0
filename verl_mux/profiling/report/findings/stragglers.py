"""Findings about what the others of a step waited for: `straggler`, `long_tail`, `preprocessing`. Called by all_findings.py;
pure.

Where the log knows engines, a straggler is a replica, or all replicas of a node, that took longer for each token than those on
other nodes (than all others where there is one node). More requests at once make a token slower too, but not the replica: its
tokens a
second must be fewer as well. Replicas that stood still or were short of KV cache in a step are left to those findings. Where the
log
knows no engines, a straggler is a worker whose requests all took longer than those of its peers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.findings.finding import Finding, Place
from verl_mux.profiling.report.measures.analysis import Analysis, completion
from verl_mux.profiling.report.measures.replicas import Engines, busy, middle

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
            worker: rows for (worker,), rows in frame.group_by("worker", maintain_order=True) if rows.height >= MIN_OF_WORKER
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
                findings.append(_worker_finding(job, step, worker, ratio, lost, reason))
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
                findings.append(_worker_finding(job, step, worker, ratio, lost, reason))
    return findings


def _worker_finding(job: str, step: int, worker: int, ratio: float, lost: float, reason: str) -> Finding:
    text = f"worker {worker} was {ratio:.1f} times slower than its peers; they waited {lost:.1f} s for it"
    advice = WORKER_ADVICE.format(ratio=ratio, reason=reason)
    return Finding("straggler", job, step, worker, lost, text, advice, evidence={"times_slower": round(ratio, 3)})


MIN_STAYS = 4
THROUGHPUT = 0.85  # of its peers' tokens a second
ENGINE_ADVICE = (
    "a token took {ratio:.1f} times as long on {place} as on {others}, with no more requests at once: compare clocks, power and "
    "temperature, other users of the GPUs and of the host's cores and memory, and links; until then take it out of the pool"
)


@dataclass(frozen=True)
class _Engine:
    """A replica in a step. pace: seconds a token. rate: tokens a second. end: of its last stay; as the log's clock."""

    stays: int
    pace: float
    rate: float
    end: float
    usual: float


def find_engines(analysis: Analysis, gaps: Collection[Place], starved: Collection[Place]) -> list[Finding]:
    """One finding a job and replica, at its worst step; one for all replicas of a node that were slow together."""
    engines = analysis.engines
    by_step: dict[tuple[str, int], dict[int, _Engine]] = {}
    for (job, step, replica), judged in _engines(engines.stays).items():
        if (job, step, replica) not in starved and (job, step, replica) not in gaps:
            by_step.setdefault((job, step), {})[replica] = judged
    seen: dict[tuple[str, int], list[_Judged]] = {}
    for (job, step), replicas in by_step.items():
        for replica, peers in _peers(job, replicas, engines).items():
            beside = _judge(job, step, replica, replicas[replica], peers, engines)
            if beside is not None:
                seen.setdefault((job, replica), []).append(beside)
    slow = {place: _slow(steps) for place, steps in seen.items()}
    return _by_node([together(found) for found in slow.values() if found], engines)


@dataclass(frozen=True)
class _Judged:
    """A replica in a step beside its peers. log: of how many times slower it was. unsure: how far chance alone takes that.
    finding: where it was slower by enough, and it cost enough."""

    log: float
    stays: int
    unsure: float
    finding: Finding | None


def _slow(judged: list[_Judged]) -> list[Finding]:
    """Its findings: of steps that tell by themselves, or of all where the steps together do."""
    stays = sum(it.stays for it in judged)
    mean = sum(it.log * it.stays for it in judged) / stays
    if mean >= np.log(SLOWER) and mean >= DEVIATIONS * max(FEW_SPREAD / np.sqrt(stays), MIN_SPREAD):
        return [it.finding for it in judged if it.finding is not None]
    return [it.finding for it in judged if it.finding is not None and it.log >= DEVIATIONS * it.unsure]


def _engines(stays: pl.DataFrame) -> dict[Place, _Engine]:
    """Of each place with MIN_STAYS that tell a pace, or more."""
    known = pl.col("pace").is_not_null()
    rows = stays.sort("start").group_by("job", "step", "replica", maintain_order=True).agg(
        known.sum().alias("stays"), pl.col("pace").median(), pl.col("tokens").sum(), busy(),
        pl.col("end").filter(known).max(), pl.col("work").filter(known).median().alias("usual"),
    ).filter(pl.col("stays") >= MIN_STAYS)  # fmt: skip
    return {
        (job, step, replica): _Engine(n, pace, float(tokens) / max(used, 1e-9), end, usual)
        for job, step, replica, n, pace, tokens, used, end, usual in rows.rows()
    }


@dataclass(frozen=True)
class _Peers:
    """The middle of those that a replica is compared with. spread: of the logs of their paces, as a standard deviation."""

    pace: float
    spread: float
    rate: float
    end: float


def _peers(job: str, replicas: dict[int, _Engine], engines: Engines) -> dict[int, _Peers]:
    """Replica -> its peers in a step: those on other nodes; all others where there is one node. None where it has none."""
    node = {replica: engines.node_of.get((job, replica)) for replica in replicas}
    apart: dict[int, Any] = node if len(set(node.values())) > 1 else {replica: replica for replica in replicas}
    found = {at: _middle_of([it for replica, it in replicas.items() if apart[replica] != at]) for at in set(apart.values())}
    return {replica: peers for replica in replicas if (peers := found[apart[replica]]) is not None}


def _middle_of(others: list[_Engine]) -> _Peers | None:
    if not others:
        return None
    paces = np.array([other.pace for other in others])
    usual = float(np.median(paces))
    if usual <= 0:
        return None
    spread = 1.4826 * float(np.median(np.abs(np.log(np.maximum(paces, 1e-9) / usual))))
    return _Peers(usual, spread, middle([other.rate for other in others]), middle([other.end for other in others]))


def _judge(job: str, step: int, replica: int, it: _Engine, peers: _Peers, engines: Engines) -> _Judged | None:
    if it.pace <= 0:
        return None
    unsure = max(peers.spread, FEW_SPREAD / np.sqrt(it.stays), MIN_SPREAD)
    ratio = it.pace / peers.pace
    finding = None
    if ratio >= SLOWER and it.rate <= THROUGHPUT * peers.rate:
        lost = max(it.end - peers.end, (1 - 1 / ratio) * it.usual)
        began, ended = engines.steps[job, step]
        finding = (
            _engine_finding(job, step, replica, lost, ratio, peers.pace, engines) if lost >= COST * (ended - began) else None
        )
    return _Judged(float(np.log(ratio)), it.stays, unsure, finding)


def _engine_finding(job: str, step: int, replica: int, lost: float, ratio: float, usual: float, engines: Engines) -> Finding:
    node = engines.node_of.get((job, replica))
    text = f"replica {replica} on {node} took {ratio:.1f} times as long for a token as its peers; it cost the step {lost:.1f} s"
    advice = ENGINE_ADVICE.format(ratio=ratio, place=f"replica {replica}", others="its peers")
    evidence = {"times_slower": round(ratio, 3), "seconds_per_token": round(ratio * usual, 6), "of_peers": round(usual, 6)}
    return Finding("straggler", job, step, None, lost, text, advice, evidence=evidence, **engines.where(job, replica))


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
