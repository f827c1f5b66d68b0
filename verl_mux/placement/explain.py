"""Why a job is where it is, and what other places would have cost, as data and as a sentence.

Pure and read-only; called by planner.py for a job that arrives, and by the coordinator and `verl-mux plan` for the sentences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from verl_mux.placement.feasibility import TOLERANCE
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.groups import STRATEGIES, Extension, Place, extensions, isolated_usd, pairs_of_pins
from verl_mux.placement.model import Group, JobSpec, NodeKind, allowed, modes_of, too_large
from verl_mux.placement.placer import Placer

# Groups that are looked at where there are too many.
NEAREST = 2

# --- a decision ---


# By whether both phases run on its training nodes.
OWN_NODES = {False: "isolated", True: "colocated"}


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A place that was not taken. group None: nodes of its own, by the strategy `isolated` or `colocated`. usd_per_hour: what it
    would have added; work_usd_per_hour: the same for as much work, where places are compared by that (`Price` in groups.py).
    why: the reason; empty: the job could go there."""

    group: str | None
    strategy: str
    usd_per_hour: float | None
    why: str
    work_usd_per_hour: float | None = None

    @property
    def price(self) -> float:
        """USD per hour by which places are compared, of one that the job could take."""
        return (self.usd_per_hour or 0.0) if self.work_usd_per_hour is None else self.work_usd_per_hour


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """outcome: `placed`, or `queued` in a finite cluster that has no room now. rollout, train: nodes of its phases, the same ones
    if it is colocated. usd_per_hour: added by the job. wait: why it is queued."""

    job: str
    outcome: str
    strategy: str | None = None
    group: str | None = None
    rollout: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    order: str = "fifo"
    usd_per_hour: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    wait: str = ""

    @property
    def was(self) -> tuple[str | None, str | None]:
        """Group and strategy as in an Alternative."""
        return (None if self.strategy in OWN_NODES.values() else self.group), self.strategy


def decision_for(group: Group, usd_per_hour: float) -> Decision:
    """The decision that put the last job of `group` there, at `usd_per_hour` more for all groups."""
    *others, pin = group.pins
    new_rollout = not set(pin.rollout) <= {node for other in others for node in other.rollout}
    new_train = not set(pin.train) <= {node for other in others for node in other.train}
    return Decision(
        job=pin.job.name,
        outcome="placed",
        strategy=STRATEGIES[new_rollout, new_train] if others else OWN_NODES[pin.job.colocated],
        group=group.name,
        rollout=pin.runs_rollouts_on,
        train=pin.train,
        order=group.order,
        usd_per_hour=usd_per_hour,
    )


# --- the places that a job could take; asked before it is admitted ---


def alternatives(placer: Placer, job: JobSpec, most: int | None = None) -> list[Alternative]:
    """What every group would ask for the job, or why it cannot take it; last, what nodes of its own would cost, in each mode.
    most: of more groups than this, only the NEAREST, which could ask the least."""
    groups = list(placer.groups.values())
    if most is not None and len(groups) > most:
        near = placer.search.shortlist(modes_of(job, placer.cluster, placer.rules), math.inf)
        groups = list({group.name: group for _, _, group in near}.values())[:NEAREST]
    modes = allowed(job, placer.rules)
    return [*(_at(placer, modes, group) for group in groups), *(_alone(placer, placed) for placed in modes)]


def _alone(placer: Placer, job: JobSpec) -> Alternative:
    why = too_large(job, placer.cluster) or _short(placer, job.nodes, "nodes")
    return Alternative(group=None, strategy=OWN_NODES[job.colocated], usd_per_hour=isolated_usd(job, placer.cluster), why=why)


def _at(placer: Placer, modes: Sequence[JobSpec], group: Group) -> Alternative:
    """The cheapest way into the group, or what stands against the one that comes closest."""
    if len(group.pins) >= placer.rules.cap:
        return _refused(group, f"full: {len(group.pins)} jobs, the cap")
    ways = [_in_mode(placer, placed, group) for placed in modes]
    return min((way for way in ways if not way.why), key=lambda way: way.price, default=ways[0])


def cheapest(ways: Iterable[Alternative]) -> float:
    """The price of the cheapest that the job could take; infinite: it could take none now."""
    return min((way.price for way in ways if not way.why), default=math.inf)


def _in_mode(placer: Placer, job: JobSpec, group: Group) -> Alternative:
    rules = placer.rules
    found = extensions(group, job, placer.cluster, rules)
    if not found:
        return _refused(group, _no_room(placer, job, group))
    rollout, train = pairs_of_pins(group.pins)
    ways = []
    for ask in found:
        if placer.feasibility.allows((*group.jobs, job), rollout | ask.rollout.pairs, train | ask.train.pairs):
            why = _short(placer, (ask.rollout.new, ask.train.new), "new nodes")
            work_usd = placer.search.priced(job, group, ask).usd if rules.count_stays else None
            way = Alternative(group=group.name, strategy=ask.strategy, usd_per_hour=ask.usd, why=why, work_usd_per_hour=work_usd)
            ways.append(way)
            if not why and not rules.count_stays:
                break  # none that follows costs less
    if ways:
        return min(ways, key=lambda way: (bool(way.why), way.price))
    return _refused(group, _too_slow(job, group, found[0]), found[0])


def _refused(group: Group, why: str, ask: Extension | None = None) -> Alternative:
    strategy, usd = (ask.strategy, ask.usd) if ask else ("direct packing", None)
    return Alternative(group=group.name, strategy=strategy, usd_per_hour=usd, why=why)


def _short(placer: Placer, need: tuple[int, int], what: str) -> str:
    free = placer.groups.free
    if need[0] <= free[0] and need[1] <= free[1]:
        return ""
    return f"needs {need[0]} + {need[1]} {what}; free are {free[0]:g} + {free[1]:g}"


def _no_room(placer: Placer, job: JobSpec, group: Group) -> str:
    on = [group.on_rollout(node) for node in group.rollout_nodes], [group.on_train(node) for node in group.train_nodes]
    return "; ".join(_side_full(at, job, on[at], placer.cluster.kinds[at]) for at in (0, 1) if job.nodes[at] and on[at])


def _side_full(at: int, job: JobSpec, nodes: Sequence[Sequence[JobSpec]], kind: NodeKind) -> str:
    side = ("rollout", "train")[at]
    memory_gb, share = job.memory_gb[at], getattr(job, f"{side}_share")
    roomy = [on for on in nodes if sum(j.memory_gb[at] for j in on) + memory_gb <= kind.host_memory_gb]
    if not roomy:
        return f"no {side} node has {memory_gb:.0f} GB of host memory left"
    least = min(sum(getattr(j, f"{side}_share") for j in on) for on in roomy)
    if least + share > TOLERANCE:
        return f"every {side} node is busy for at least {least:.0%} of the time and the job needs {share:.0%}"
    return f"no allowed way to share its {side} nodes"


def _too_slow(job: JobSpec, group: Group, ask: Extension) -> str:
    """The job that would miss its SLO in the cheapest layout; or that a departure could make a job miss it."""
    whole = Place(job, ask.usd, group, ask).group
    for member, period in zip(whole.jobs, group_periods(whole).values(), strict=True):
        if period > member.limit_s * TOLERANCE:
            return f"{member.name} would take {period:.0f} s an iteration, its SLO allows {member.limit_s:.0f} s"
    return "within every SLO now, but not if one of its jobs left"


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
