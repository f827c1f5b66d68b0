"""R9: the two weeks of section 7.4, synthesised: the trace is private, so only its shape can be compared.

200 jobs, the ten workloads of figure 2 equally likely, lengths exponential with a mean of 27.9 h, arrivals even over the
time that leaves 370 h in all, 91 % on 1 + 1 nodes of eight and 9 % on 2 + 2, SLO U(1, 2).
"""

from __future__ import annotations

import functools
import random

import msgspec

from research.optimum.optimum import Optimum
from research.outcome import Outcome, assess
from research.paper.figure import Figure
from research.paper.testbed import STARTS, WORKLOADS, make_job
from research.policies import POLICIES, Case
from research.workload.moments import Moments
from research.workload.workload import Arrival
from verl_mux.placement.model import TESTBED
from verl_mux.placement.rules import OURS

JOBS, MEAN_H, SPAN_H, LARGE = 200, 27.9, 370.0, 0.09
# Table 2, GB of host memory per node of eight: rollout, training. 4B and 8B count as the next model there.
MEMORY_GB = {"4B": (275.7, 240.0), "7B": (275.7, 240.0), "8B": (445.4, 456.1), "14B": (445.4, 456.1), "32B": (490.3, 520.4)}


def draw_trace() -> list[Arrival]:
    rng = random.Random(9)
    return [_arrival(f"job{i}", rng) for i in range(JOBS)]


def _arrival(name: str, rng: random.Random) -> Arrival:
    workload = rng.choice(sorted(WORKLOADS))
    model = workload.partition("-")[0]
    count = 2 if rng.random() < LARGE else 1
    job = make_job(name, model, *WORKLOADS[workload], nodes=(count, count))
    job = msgspec.structs.replace(
        job, slo=rng.uniform(1, 2), rollout_memory_gb=MEMORY_GB[model][0], train_memory_gb=MEMORY_GB[model][1],
        cold_start_s=max(STARTS[model].rollout_cold, STARTS[model].train_cold),
    )  # fmt: skip
    hours = min(rng.expovariate(1 / MEAN_H), SPAN_H / 2)
    at_h = rng.uniform(0, SPAN_H - MEAN_H)
    return Arrival(job, at_h * 3600, max(1, round(hours * 3600 / job.iteration_s)))


@functools.cache
def outcomes() -> dict[str, Outcome]:
    """By policy. ours: the rules that the coordinator runs. moving: the same where running jobs can be moved."""
    arrivals = draw_trace()
    optimum = Optimum([a.job for a in arrivals], TESTBED, OURS, 1)
    moments = {arrival.job.name: Moments(arrival) for arrival in arrivals}
    case = Case(arrivals, moments, TESTBED, msgspec.structs.replace(OURS, repack=False), 0, optimum)
    each = {name: assess(POLICIES[name](case), TESTBED, moments, None) for name in ("solo", "colocated", "rollmux", "ours")}
    moving = POLICIES["ours"](msgspec.structs.replace(case, rules=OURS))
    return {**each, "moving": assess(moving, TESTBED, moments, None)}


def two_weeks() -> list[Figure]:
    """Ratios rather than USD: what the jobs were is not known."""
    each = outcomes()
    cost = {name: outcome.usd_per_hour_mean for name, outcome in each.items()}
    ours, solo = each["ours"], each["solo"]
    found = [
        ("saving over nodes of one's own", 1.84, cost["solo"] / cost["ours"], "x"),
        ("the same by Algorithm 1 as printed", 1.84, cost["solo"] / cost["rollmux"], "x"),
        ("the same if running jobs could be moved", 1.84, cost["solo"] / cost["moving"], "x"),
        ("saving over colocated on H800", 1.38, cost["colocated"] / cost["ours"], "x"),
        ("SLO attainment", 100.0, 100 * ours.slo_attainment, "%"),
        ("rollout nodes idle, alone", 40.8, 100 * solo.idle_rollout, "%"),
        ("rollout nodes idle, shared", 16.4, 100 * ours.idle_rollout, "%"),
        ("training nodes idle, alone", 59.1, 100 * solo.idle_train, "%"),
        ("training nodes idle, shared", 16.0, 100 * ours.idle_train, "%"),
        ("peak H800, alone over shared", 2.16, solo.peak_gpus_train / ours.peak_gpus_train, "x"),
    ]
    remark = "the trace is private: jobs drawn from figure 2, see testbed_trace.py"
    return [
        Figure(claim="R9", name=name, paper=paper, ours=value, unit=unit, basis="assumed", remark="" if i else remark)
        for i, (name, paper, value, unit) in enumerate(found)
    ]
