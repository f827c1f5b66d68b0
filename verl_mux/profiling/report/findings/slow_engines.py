"""Finding `straggler`, where the log knows engines: a replica, or all replicas of a node, that took longer for each token.

A replica is compared with those on other nodes (with all others where there is one node), step by step. More requests at
once make a token slower too, but not the replica: its tokens a second must be fewer as well. Replicas that stood still or were
short of KV cache in a step are left to those findings.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from verl_mux.profiling.report.findings.completion_gaps import Place
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.findings.stragglers import COST, DEVIATIONS, FEW_SPREAD, MIN_SPREAD, SLOWER, together
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.measures.engines import Engines, busy, middle

MIN_STAYS = 4
THROUGHPUT = 0.85  # of its peers' tokens a second
ADVICE = (
    "a token took {ratio:.1f} times as long on {who} as on {others}, with no more requests at once: compare clocks, power and "
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


def find(analysis: Analysis, gaps: Collection[Place], starved: Collection[Place]) -> list[Finding]:
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
    told = pl.col("pace").is_not_null()
    rows = stays.sort("start").group_by("job", "step", "replica", maintain_order=True).agg(
        told.sum().alias("stays"), pl.col("pace").median(), pl.col("tokens").sum(), busy(),
        pl.col("end").filter(told).max(), pl.col("work").filter(told).median().alias("usual"),
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
        finding = _finding(job, step, replica, lost, ratio, peers.pace, engines) if lost >= COST * (ended - began) else None
    return _Judged(float(np.log(ratio)), it.stays, unsure, finding)


def _finding(job: str, step: int, replica: int, lost: float, ratio: float, usual: float, engines: Engines) -> Finding:
    node = engines.node_of.get((job, replica))
    text = f"replica {replica} on {node} took {ratio:.1f} times as long for a token as its peers; it cost the step {lost:.1f} s"
    advice = ADVICE.format(ratio=ratio, who=f"replica {replica}", others="its peers")
    evidence = {"times_slower": round(ratio, 3), "seconds_per_token": round(ratio * usual, 6), "of_peers": round(usual, 6)}
    return Finding("straggler", job, step, None, lost, text, advice, evidence=evidence, **engines.where(job, replica))


def _by_node(findings: list[Finding], engines: Engines) -> list[Finding]:
    """Where all of a node's replicas, two or more, were slow beside other nodes, the node is."""
    left, told = list(findings), []
    for job, node in {(f.job, f.node) for f in findings if f.node is not None}:
        here = [f for f in left if (f.job, f.node) == (job, node)]
        of_node = {replica for (of, replica), on in engines.node_of.items() if (of, on) == (job, node)}
        alone = {on for (of, _), on in engines.node_of.items() if of == job} == {node}
        if alone or len(of_node) < 2 or {f.replica for f in here} != of_node:
            continue
        left = [f for f in left if f not in here]
        told.append(_node_finding(here))
    return left + told


def _node_finding(here: list[Finding]) -> Finding:
    worst = max(here, key=lambda finding: finding.seconds)
    replicas = sorted(f.replica for f in here if f.replica is not None)
    ratio = worst.evidence["times_slower"]
    text = (
        f"node {worst.node}: all its replicas ({', '.join(map(str, replicas))}) took up to {ratio:.1f} times as long for a token"
    )
    steps = sorted({step for f in here for step in f.evidence["steps"]})
    return replace(
        worst, text=text, advice=ADVICE.format(ratio=ratio, who=f"node {worst.node}", others="other nodes"),
        cost_s=max(f.cost_s for f in here), evidence=worst.evidence | {"replicas": replicas, "steps": steps},
    )  # fmt: skip
