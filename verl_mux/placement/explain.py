"""Why a job is where it is, and why other places lost, as data and in a sentence.

Pure and read-only; called by planner.py when it has decided, and by the coordinator and `verl-mux plan` for the sentences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from verl_mux.placement.model import OWN_NODES, Alternative, Decision, JobSpec

# --- why the job does not go there ---


def lost_to(decision: Decision, could: Sequence[Alternative]) -> list[Alternative]:
    """The places that were not chosen, with a reason for those that could have been taken: more expensive, or no better."""
    group, strategy = decision.was
    taken = [] if decision.outcome == "queued" else [p for p in could if p.group == group and (group or p.strategy == strategy)]
    return [place if place.why else _beaten(place, decision.usd_per_hour) for place in could if place not in taken]


def _beaten(place: Alternative, least: float) -> Alternative:
    usd, work = place.usd_per_hour or 0.0, place.work_usd_per_hour
    if (more := usd - least) > 0.005:
        why = f"costs {more:.2f} USD/h more"
    elif work is not None and work > usd + 0.005:
        why = f"its jobs would take longer, so that an hour of this one's work alone would cost {work:.2f} USD there"
    else:
        why = "costs the same; the fullest group is taken, then the oldest"
    return msgspec.structs.replace(place, why=why)


def lost_elsewhere(pair: str, could: Mapping[str, Sequence[Alternative]], usd: Mapping[str, float]) -> list[Alternative]:
    """The cheapest place in each other pair of pools, with why it was not taken. usd: by pair, of as much work an hour."""
    found = []
    for other in [other for other in could if other != pair]:
        place = min(could[other], key=lambda place: (bool(place.why), place.price))
        why = place.why or f"as much work costs {usd[other]:.2f} USD/h there"
        found.append(msgspec.structs.replace(place, why=f"on {other}: {why}"))
    return found


# --- in a sentence ---


def where(job: str, nodes: Sequence[str], others_on: Mapping[str, Collection[str]]) -> str:
    """The beginning of the sentence, which changes as jobs come and go. others_on: by node, the other jobs there."""
    nodes = list(dict.fromkeys(nodes))
    shared = [node for node in nodes if others_on.get(node)]
    alone = [node for node in nodes if node not in shared]
    company = sorted({other for node in shared for other in others_on[node]})
    parts = [f"shares {', '.join(shared)} with {', '.join(company)}"] if shared else []
    parts += [f"has {', '.join(alone)} to itself"] if alone else []
    return f"{job} {' and '.join(parts)}"


def because(decision: Decision, job: JobSpec, could: Sequence[Alternative]) -> str:
    """The rest of the sentence, as of when the job came. could: all places, with why it could not go there, if so."""
    parts = [_reason(decision, could)]
    others = [place for place in could if not place.why and (place.group, place.strategy) != decision.was]
    if others and decision.outcome != "queued":
        other = min(others, key=lambda way: way.price)
        at = f"with group {other.group}" if other.group is not None else "on nodes of its own"
        parts.append(f"{at} it would have cost {other.price:.2f} USD/h")
    if job.rollout.source == "bound":
        parts.append(
            "to be placed by more than bounds, every response at its limit, tell the seconds of a few steps (mux.profiled)"
        )
    return "; ".join(parts)


def in_other_pairs(pair: str, usd: Mapping[str, float]) -> str:
    """The end of the sentence, where jobs could go to other pairs of pools. usd: by pair, of as much work an hour."""
    dearer = {other: cost for other, cost in usd.items() if other != pair and cost < math.inf}
    return "".join(f"; on {other} as much work would have cost {cost:.2f} USD/h" for other, cost in dearer.items())


def _reason(decision: Decision, could: Sequence[Alternative]) -> str:
    if decision.outcome == "queued":
        return decision.wait
    added = f"which added {decision.usd_per_hour:.2f} USD/h"
    groups = [place for place in could if place.group is not None]
    refused = next((place for place in groups if place.why), None)
    if decision.strategy not in OWN_NODES.values() or (groups and refused is None):
        return f"{added}, and no other place added less"
    if refused is None:
        return f"{added}, as there was no job yet to share with"
    return f"{added}, as group {refused.group} could not take it: {refused.why.replace('; ', ', and ')}"
