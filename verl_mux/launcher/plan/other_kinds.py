"""What the jobs of a file would cost on GPUs of other kinds.

Nodes are rented as they are needed here, whatever the file's pools have, with as many GPUs as there. A phase lasts elsewhere as
in the file, times what its bounds on both kinds differ by (estimate/estimator.py), so it takes what a step computes to say
anything. An SLO stays what it is in seconds. As faster nodes do more in an hour, costs are compared by work: USD for what the
jobs do in an hour, each alone on the file's kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from verl_mux.placement.estimate.estimator import bounds, on_other_kinds, requests_held
from verl_mux.placement.model import COLOCATED, SEPARATE, Cluster, JobSpec, Pool
from verl_mux.placement.placer.explain import alternatives, cheapest
from verl_mux.placement.placer.placer import Placer
from verl_mux.placement.search.cheapest_nodes import EPSILON_USD, isolated_usd
from verl_mux.placement.search.modes import allowed, too_large
from verl_mux.placement.time.feasibility import TOLERANCE
from verl_mux.placement.time.periods import periods_by_job

if TYPE_CHECKING:
    from verl_mux.launcher.plan.jobs_file import JobsFile

# Groups of each two kinds that a job is compared with at most, before it goes where it adds the least.
NEAR = 8
# Choices of kinds that people are told of; programs are told of all.
SHOWN = 6


class Kinds(msgspec.Struct, frozen=True):
    """Of the GPUs that rollouts and trainings run on; colocated, they are the same ones."""

    rollout: str
    train: str
    colocated: bool = False

    def __str__(self) -> str:
        return (
            f"{self.train} for both phases in turn"
            if self.colocated
            else f"{self.rollout} for rollout, {self.train} for training"
        )


class Market(msgspec.Struct, frozen=True):
    """One choice of kinds: pools without end, the jobs as they would be there, by name, and why others cannot be there."""

    kinds: Kinds
    cluster: Cluster
    jobs: dict[str, JobSpec]
    refused: dict[str, str]


def other_kinds(given: JobsFile) -> dict[str, Any]:
    """prices: USD per GPU-hour of all known kinds, None: not known. file: all jobs on the file's kinds. choices: on others,
    cheapest first; who has to `stay` on the file's is in the sum. each: every job where it adds the least. cheapest: which of
    these three. jobs: each of them alone, on all kinds. None and empty where no job says what it computes."""
    prices = _prices(given)
    own = _own(given)
    here = _placed(given, given.jobs, _rented(given.cluster))
    found: dict[str, Any] = {"prices": prices, "file": {**msgspec.to_builtins(own), **_cost(given, [here])}}
    markets = [_market(given, kinds) for kinds in _choices(given, prices)] if given.needs else []
    others = [_choice(given, market) for market in markets if market.jobs and market.kinds != own]
    found["choices"] = sorted(others, key=lambda choice: choice["work_usd_per_hour"])
    found["each"] = _each(given, markets) if others else None
    costs = {"file": found["file"], "choices": next(iter(found["choices"]), None), "each": found["each"]}
    work = {name: cost["work_usd_per_hour"] for name, cost in costs.items() if cost is not None}
    least = min(work.values())
    found["cheapest"] = next(name for name, usd in work.items() if usd < least + EPSILON_USD)
    found["jobs"] = [{"job": job.name, "places": _alone(job, markets)} for job in given.jobs]
    return found


def _own(given: JobsFile) -> Kinds:
    return Kinds(given.cluster.rollout.kind.name, given.cluster.train.kind.name)


def _prices(given: JobsFile) -> dict[str, float | None]:
    table = {name: kind.usd_per_gpu_hour or None for name, kind in given.kinds.items()}
    return {**table, **{pool.kind.name: pool.kind.usd_per_gpu_hour for pool in (given.cluster.train, given.cluster.rollout)}}


def _choices(given: JobsFile, prices: dict[str, float | None]) -> list[Kinds]:
    """Each two kinds that have a price, and each one for both phases."""
    names = [name for name, usd in prices.items() if usd is not None and name in given.kinds]
    return [*(Kinds(*pair) for pair in itertools.product(names, names)), *(Kinds(name, name, True) for name in names)]


# --- where jobs can be ---


def _market(given: JobsFile, kinds: Kinds) -> Market:
    cluster, pools = given.cluster, (given.cluster.rollout, given.cluster.train)
    rollout, train = _of_kind(cluster.rollout, kinds.rollout, pools, given), _of_kind(cluster.train, kinds.train, pools, given)
    market = Market(kinds, _rented(msgspec.structs.replace(cluster, rollout=rollout, train=train)), {}, {})
    for job in given.jobs:
        if why := _why_not(given, job, kinds):
            market.refused[job.name] = why
            continue
        there = _moved(given, job, kinds)
        if why := too_large(there, market.cluster) or _too_slow(there, kinds, given):
            market.refused[job.name] = why
        else:
            market.jobs[job.name] = there
    return market


def _of_kind(pool: Pool, name: str, pools: Iterable[Pool], given: JobsFile) -> Pool:
    """The pool with GPUs of that kind, at the price that the file has for it on either side."""
    if name == pool.kind.name:
        return pool
    usd = next((it.kind.usd_per_gpu_hour for it in pools if it.kind.name == name), given.kinds[name].usd_per_gpu_hour)
    return msgspec.structs.replace(pool, kind=msgspec.structs.replace(pool.kind, name=name, usd_per_gpu_hour=usd))


def _rented(cluster: Cluster) -> Cluster:
    rollout, train = (msgspec.structs.replace(pool, nodes=None) for pool in (cluster.rollout, cluster.train))
    return msgspec.structs.replace(cluster, rollout=rollout, train=train)


def _why_not(given: JobsFile, job: JobSpec, kinds: Kinds) -> str:
    own, needs = _own(given), given.needs.get(job.name)
    if kinds.colocated not in [placed.colocated for placed in allowed(job, given.rules)]:
        return f"it cannot run {COLOCATED}" if kinds.colocated else f"it runs {COLOCATED} alone"
    if kinds in (own, Kinds(own.train, own.train, True)):
        return ""
    if needs is None:
        own_kinds = own.train if job.colocated else f"{own.rollout} and {own.train}"
        return f"its phases are given in seconds alone, which are of {own_kinds}; say what a step computes (`computes`)"
    if requests_held(needs, given.kinds[kinds.rollout]) < 1:
        return f"its model leaves no room for one request on {needs.replica_gpus} {kinds.rollout}"
    return ""


def _moved(given: JobsFile, job: JobSpec, kinds: Kinds) -> JobSpec:
    """The job on these kinds, with the limit of its SLO as it was."""
    mode = COLOCATED if kinds.colocated else SEPARATE
    there = msgspec.structs.replace(job, modes=(mode,), colocated=kinds.colocated, solo_s=job.limit_s / job.slo)
    needs, own = given.needs.get(job.name), _own(given)
    if needs is None:
        return there
    before = bounds(needs, given.kinds[own.train if job.colocated else own.rollout], given.kinds[own.train])
    if kinds.colocated:
        needs = msgspec.structs.replace(needs, rollout_gpus=needs.train_gpus)
    after = bounds(needs, given.kinds[kinds.rollout], given.kinds[kinds.train])
    return on_other_kinds(there, before, after)


def _too_slow(there: JobSpec, kinds: Kinds, given: JobsFile) -> str:
    if kinds == _own(given) or there.iteration_s <= there.limit_s * TOLERANCE:
        return ""
    return f"a step alone takes {there.iteration_s:.0f} s there, its SLO allows {there.limit_s:.0f} s"


# --- what it costs ---


def _alone(job: JobSpec, markets: Iterable[Market]) -> list[dict[str, Any]]:
    """On all kinds, cheapest step first."""
    told: list[dict[str, Any]] = []
    for market in markets:
        about: dict[str, Any] = {"step_s": None, "usd_per_hour": None, "usd_per_step": None}
        if there := market.jobs.get(job.name):
            usd = isolated_usd(there, market.cluster)
            about = {"step_s": there.iteration_s, "usd_per_hour": usd, "usd_per_step": usd * there.iteration_s / 3600}
        told.append({**msgspec.to_builtins(market.kinds), **about, "why": market.refused.get(job.name, "")})
    return sorted(told, key=lambda place: (bool(place["why"]), place["usd_per_step"]))


def _choice(given: JobsFile, market: Market) -> dict[str, Any]:
    stay = [job for job in given.jobs if job.name in market.refused]
    placers = [_placed(given, market.jobs.values(), market.cluster), _placed(given, stay, _rented(given.cluster))]
    return {**msgspec.to_builtins(market.kinds), **_cost(given, placers), "stay": market.refused}


def _each(given: JobsFile, markets: Iterable[Market]) -> dict[str, Any]:
    """One job after the other, where by work it adds the least."""
    placers = {market.kinds: Placer(market.cluster, given.rules) for market in markets}
    where = {}
    for job in given.jobs:
        open_to_it = [(market.kinds, there) for market in markets if (there := market.jobs.get(job.name)) is not None]
        kinds, there = min(open_to_it, key=lambda way: _adds(placers[way[0]], way[1]) * way[1].iteration_s)
        placers[kinds].admit(there)
        where[job.name] = msgspec.to_builtins(kinds)
    return {**_cost(given, placers.values()), "jobs": where}


def _adds(placer: Placer, job: JobSpec) -> float:
    return cheapest(alternatives(placer, job, NEAR))


def _placed(given: JobsFile, jobs: Iterable[JobSpec], cluster: Cluster) -> Placer:
    placer = Placer(cluster, given.rules)
    for job in jobs:
        placer.admit(job)
    return placer


def _cost(given: JobsFile, placers: Iterable[Placer]) -> dict[str, float]:
    """Of all groups, by the hour and by work."""
    alone_s = {job.name: job.iteration_s for job in given.jobs}
    usd = work = 0.0
    for placer in placers:
        for group in placer.groups.values():
            here, periods = group.usd_per_hour(placer.cluster), periods_by_job(group)
            of_jobs = {job.name: isolated_usd(job, placer.cluster) for job in group.jobs}
            longer = sum(each * periods[name].mean_s / alone_s[name] for name, each in of_jobs.items())
            usd, work = usd + here, work + here * longer / (sum(of_jobs.values()) or 1.0)  # nodes may cost nothing
    return {"usd_per_hour": usd, "work_usd_per_hour": work}


# --- in words ---


def lines(found: dict[str, Any]) -> list[str]:
    file, unknown = found["file"], [name for name, usd in found["prices"].items() if usd is None]
    own = f"{file['rollout']} and {file['train']}"
    if not found["choices"]:
        return [f"other kinds of GPUs: not compared, as no job says what a step computes (`computes`); seconds are of {own}"]
    said = [f"other kinds of GPUs, nodes rented as needed; USD for what the jobs do in an hour, each alone on {own}:"]
    said += [f"    {_named(one)}: {one['work_usd_per_hour']:.2f}{_staying(one)}" for one in found["choices"][:SHOWN]]
    if (more := len(found["choices"]) - SHOWN) > 0:
        said.append(f"    and {more} that cost more (--json has all)")
    said += [f"    each where it adds the least: {found['each']['work_usd_per_hour']:.2f} ({_apart(found['each']['jobs'])})"]
    said += [f"    as in the file: {file['work_usd_per_hour']:.2f}", f"    {_verdict(found)}"]
    said += [f"    {_of_job(job, file)}" for job in found["jobs"]]
    if unknown:
        said += [
            f"    not compared, for want of a price: {', '.join(unknown)}; give `kinds: {{NAME: {{usd_per_gpu_hour: ...}}}}`"
        ]
    return said


def _named(place: dict[str, Any]) -> str:
    return str(Kinds(place["rollout"], place["train"], place["colocated"]))


def _staying(choice: dict[str, Any]) -> str:
    return f" ({', '.join(choice['stay'])} left as in the file)" if choice["stay"] else ""


def _apart(jobs: dict[str, dict[str, Any]]) -> str:
    on: dict[str, list[str]] = {}
    for name, place in jobs.items():
        on.setdefault(_named(place), []).append(name)
    return "; ".join(f"{', '.join(names)} on {kinds}" for kinds, names in on.items())


def _verdict(found: dict[str, Any]) -> str:
    if found["cheapest"] == "file":
        return "cheapest: as in the file"
    best = found["choices"][0] if found["cheapest"] == "choices" else found["each"]
    saves = 1 - best["work_usd_per_hour"] / found["file"]["work_usd_per_hour"]
    named = _named(best) if best is not found["each"] else "each where it adds the least"
    return f"cheapest: {named}, {saves:.0%} less than as in the file"


def _of_job(job: dict[str, Any], file: dict[str, Any]) -> str:
    best, own = job["places"][0], next(place for place in job["places"] if _named(place) == _named(file))
    if refused := next((place["why"] for place in job["places"] if "`computes`" in place["why"]), None):
        return f"{job['job']}: {refused}"
    said = f"{job['job']}, alone: {best['usd_per_step']:.2f} USD a step of {best['step_s']:.0f} s on {_named(best)}, the least"
    if best is own or own["usd_per_step"] is None:
        return said
    return f"{said}; {own['usd_per_step']:.2f} of {own['step_s']:.0f} s on {_named(own)}"
