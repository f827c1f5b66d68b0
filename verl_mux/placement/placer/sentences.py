"""Why a job is where it is, what it would have cost elsewhere, and what it could change to save, as one sentence. Read-only."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from verl_mux.placement.model import COLOCATED, SEPARATE, JobSpec
from verl_mux.placement.placer.explain import alternatives, cheapest, price
from verl_mux.placement.placer.placer import Placer
from verl_mux.placement.search.cheapest_nodes import EPSILON_USD
from verl_mux.placement.search.decision import OWN_NODES, Alternative, Decision
from verl_mux.placement.search.modes import modes_of

# An SLO so many times as large is tried; one that takes more than this is another job.
LARGER_SLOS = (1.5, 2.0)


class Advice(msgspec.Struct, frozen=True):
    """What to change, and USD per hour that this saves; None: the job would start, which it does not now."""

    how: str
    saves_usd_per_hour: float | None


def advice(placer: Placer, job: JobSpec, could: Sequence[Alternative], most: int | None = None) -> Advice | None:
    """The change after which the job could be placed cheapest, if it is cheaper than the places that it `could` take. To be asked
    before it is admitted. most: as of alternatives()."""
    now = cheapest(could)
    if now <= EPSILON_USD:
        return None
    best: Advice | None = None
    least = now
    for how, other in _changes(job):
        if not modes_of(other, placer.cluster, placer.rules):
            continue
        placer.feasibility.forget(job.name)  # verdicts are remembered by name
        then = cheapest(alternatives(placer, other, most))
        if then < least - EPSILON_USD:
            best, least = Advice(how, now - then if now < math.inf else None), then
    placer.feasibility.forget(job.name)
    return best


def _changes(job: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    for times in LARGER_SLOS:
        slo = job.slo * times
        yield f"let an iteration take {slo:g} times as long as alone (its SLO)", msgspec.structs.replace(job, slo=slo)
    if job.rollout_nodes == job.train_nodes and COLOCATED not in job.modes:
        other = msgspec.structs.replace(job, modes=(COLOCATED,), colocated=True)
        yield "run both phases on the same training nodes (mux_colocate)", other
    if SEPARATE not in job.modes:
        other = msgspec.structs.replace(job, modes=(SEPARATE,), colocated=False)
        yield "run its phases on nodes of both pools (mux_separate)", other


def where(job: str, nodes: Sequence[str], others_on: Mapping[str, Collection[str]]) -> str:
    """The beginning of the sentence, which changes with who comes and goes. others_on: by node, who is there besides."""
    nodes = list(dict.fromkeys(nodes))
    shared = [node for node in nodes if others_on.get(node)]
    alone = [node for node in nodes if node not in shared]
    company = sorted({other for node in shared for other in others_on[node]})
    parts = [f"shares {', '.join(shared)} with {', '.join(company)}"] if shared else []
    parts += [f"has {', '.join(alone)} to itself"] if alone else []
    return f"{job} {' and '.join(parts)}"


def because(decision: Decision, job: JobSpec, could: Sequence[Alternative], found: Advice | None) -> str:
    """The rest of it, as of when the job came. could: all places, with why it could not go there, if so."""
    parts = [_reason(decision, could), _elsewhere(decision, could), _saving(job, found)]
    return "; ".join(part for part in parts if part)


def in_other_pairs(pair: str, usd: Mapping[str, float]) -> str:
    """The end of it, where jobs could go to other pairs of pools. usd: by pair, of as much work an hour (by_price)."""
    said = [
        f"on {other} as much work would have cost {cost:.2f} USD/h"
        for other, cost in usd.items()
        if other != pair and cost < math.inf
    ]
    return "".join(f"; {it}" for it in said)


def _reason(decision: Decision, could: Sequence[Alternative]) -> str:
    if decision.outcome == "queued":
        return decision.wait
    added = f"which added {decision.usd_per_hour:.2f} USD/h"
    groups = [place for place in could if place.group is not None]
    refused = next((place for place in groups if place.why), None)
    if decision.strategy not in OWN_NODES.values() or (groups and refused is None):
        return f"{added}, and no other place added less"
    if refused is None:
        return f"{added}, as nobody was there yet to share with"
    return f"{added}, as group {refused.group} could not take it: {refused.why.replace('; ', ', and ')}"


def _elsewhere(decision: Decision, could: Sequence[Alternative]) -> str:
    others = [place for place in could if not place.why and (place.group, place.strategy) != decision.was]
    if not others or decision.outcome == "queued":
        return ""
    other = min(others, key=price)
    at = f"with group {other.group}" if other.group is not None else "on nodes of its own"
    return f"{at} it would have cost {price(other):.2f} USD/h"


def _saving(job: JobSpec, found: Advice | None) -> str:
    if found is not None:
        saves = found.saves_usd_per_hour
        return f"to start now, {found.how}" if saves is None else f"to save {saves:.2f} USD/h, {found.how}"
    if job.rollout.source == "bound":
        return "to be placed by more than bounds, every response at its limit, tell the seconds of a few steps (mux.profiled)"
    return ""
