"""R5: long-tail migration of two jobs on the same nodes, planned ahead from the response lengths of figure 11.

The rollout decides at run time, from the requests it has, with `rollout/control/replica_plan.py`; the very same function is
asked here about a rollout of expected lengths. Its answer becomes a job's `tail_s`: the time its rollout no longer
holds its nodes. While the tail runs, the next job has only the nodes that were freed; so of a tail of t seconds that
keeps k of n nodes, (n - k) / n of it count as freed, and node-seconds are the same. Called by __main__.py; pure.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from research.paper.figure import Figure
from research.paper.schedules import grouped
from research.paper.testbed import WORKLOADS, make_job
from research.workload.varying import length_at, read_lengths
from verl_mux.placement.feasibility import TOLERANCE
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.model import Estimate, Group, JobSpec, Pin
from verl_mux.rollout.control.replica_plan import EngineSpeed, Migration, MigrationPolicy, Replica, Request, plan

# A GPU is an engine. The paper sets no limit to how much longer the tail may take.
GPUS, RESPONSES, PROMPT_TOKENS, DRAWS = 8, 256, 512, 5
MAX_SLOWDOWN = 1.0
NO_LIMIT = 10**9  # of requests and tokens on one engine
# A full batch of 32 a GPU makes a decoding step half as long again; an engine prefills 5000 tokens a second.
BATCH_SHARE, PREFILL = 0.5, 5000.0
WORKLOAD_OF = {"7B-4k": "7B-4K-S", "7B-8k": "7B-8K-S", "14B-8k": "14B-8K-S"}
PAIRS = {("7B-4k", "7B-4k"): 1.12, ("7B-8k", "7B-8k"): 1.19, ("7B-8k", "14B-8k"): 1.06, ("14B-8k", "14B-8k"): 1.28}
REMARK = (
    "the paper gives neither batch nor phase times nor how many GPUs keep the tail; with figure 2's phase times two equal"
    " jobs cannot gain more than {cap:.2f}"
)


class Tail(NamedTuple):
    """A planned migration, in parts of the rollout without it: the whole rollout with it, and the time in which all nodes are
    free for the next job, a node freed for a part of the tail counted as that part."""

    rollout: float
    freed: float


def plan_tails(lengths: Sequence[int], engines: int, speed: EngineSpeed, thresholds: Sequence[float]) -> Iterator[Tail]:
    """What the rollout would do when these shares of its responses are done, if they got these lengths, in tokens; without those
    at which moving does not pay. engines: all alike, one a node."""
    dealt = [sorted(lengths[i::engines]) for i in range(engines)]
    ends = sorted(end for held in dealt for end, _ in _course(held, speed)[1:])
    for threshold in thresholds:
        done = math.ceil(threshold * len(lengths))
        at = ends[done - 1]
        replicas = [Replica(f"{i}", (f"{i}",), _running(held, at, speed), NO_LIMIT, NO_LIMIT) for i, held in enumerate(dealt)]
        policy = MigrationPolicy(threshold, max_slowdown=MAX_SLOWDOWN)
        answer = plan(replicas, done, len(lengths), [replica.nodes for replica in replicas], speed, policy)
        if isinstance(answer, Migration):
            before_s = at + answer.tail_before_s
            yield Tail((at + answer.tail_s) / before_s, answer.tail_s * (1 - len(answer.kept) / engines) / before_s)


def _course(held: Sequence[int], speed: EngineSpeed) -> list[tuple[float, int]]:
    """(seconds, tokens) at the start and when each response of an engine ends, the shortest first. A token of every running one
    costs a step, which gets cheaper as they end."""
    course = [(0.0, 0)]
    for ended, length in enumerate(held):
        now, tokens = course[-1]
        course.append((now + (length - tokens) * _step_s(len(held) - ended, speed), length))
    return course


def _step_s(running: int, speed: EngineSpeed) -> float:
    return speed.step_s + speed.step_per_request_s * running


def _running(held: Sequence[int], at: float, speed: EngineSpeed) -> tuple[Request, ...]:
    """The responses of an engine that run at that second."""
    passed = [point for point in _course(held, speed) if point[0] <= at + 1e-9]
    left = held[len(passed) - 1 :]
    done = passed[-1][1] + (at - passed[-1][0]) / _step_s(len(left), speed)
    return tuple(Request(f"{k}", PROMPT_TOKENS + int(done), length - done) for k, length in enumerate(left))


def with_tail(job: JobSpec, tail: Tail) -> JobSpec:
    """The job with its tail migrated: a longer rollout, if moving costs time, of which the end frees the nodes."""
    seconds = job.rollout.seconds * tail.rollout
    freed = min(job.rollout.seconds * tail.freed, seconds)
    return msgspec.structs.replace(job, rollout=Estimate(seconds=seconds), tail_s=freed, solo_s=job.limit_s / job.slo)


def with_best_tails(group: Group, tails: Mapping[str, Sequence[Tail]]) -> Group:
    """The group with those migrations of its jobs, at most one of each, with which the sum of periods over the jobs' times alone
    is least and no job is beyond an SLO that it kept before; without one, if none makes that sum less."""
    late = _late(group)
    chosen = itertools.product(*[(None, *tails.get(job.name, ())) for job in group.jobs])
    tried = [_replaced(group, each) for each in chosen]
    return min([each for each in tried if _late(each) <= late], key=lambda each: round(_slowness(each), 9))


def _replaced(group: Group, tails: Sequence[Tail | None]) -> Group:
    pins = tuple(
        Pin(job=with_tail(pin.job, tail), rollout=pin.rollout, train=pin.train) if tail else pin
        for pin, tail in zip(group.pins, tails, strict=True)
    )
    return msgspec.structs.replace(group, pins=pins)


def _slowness(group: Group) -> float:
    periods = group_periods(group)
    return sum(periods[job.name] / (job.limit_s / job.slo) for job in group.jobs)


def _late(group: Group) -> set[str]:
    periods = group_periods(group)
    return {job.name for job in group.jobs if periods[job.name] > job.limit_s * TOLERANCE}


def draw_lengths(workload: str, count: int, rng: random.Random) -> list[int]:
    """`count` lengths in tokens."""
    cdf = read_lengths()[workload]
    return [max(1, round(length_at(cdf, rng.random()))) for _ in range(count)]


def planned_tails(workload: str, seed: int) -> list[Tail]:
    """Of one rollout, whose engines decode so fast that it takes the time of figure 2."""
    drawn = draw_lengths(workload, RESPONSES, random.Random(f"{workload} {seed}"))
    step_s = WORKLOADS[WORKLOAD_OF[workload]][0] / max(drawn)
    speed = EngineSpeed(prefill=PREFILL, step_s=step_s, step_per_request_s=BATCH_SHARE * step_s / (RESPONSES / GPUS))
    return list(plan_tails(drawn, GPUS, speed, (0.8, 0.9, 0.95)))


def _gain(names: tuple[str, str], seed: int) -> float:
    jobs = [make_job(f"{i}", name.partition("-")[0], *WORKLOADS[WORKLOAD_OF[name]]) for i, name in enumerate(names)]
    group = grouped({job.name: (job, ("r1",), ("t1",)) for job in jobs})
    migrated = with_best_tails(group, {f"{i}": planned_tails(name, seed) for i, name in enumerate(names)})
    return _steps_per_s(migrated) / _steps_per_s(group)


def _steps_per_s(group: Group) -> float:
    return sum(1 / seconds for seconds in group_periods(group).values())


def migrations() -> list[Figure]:
    """Steps per second of the pair with migration at 80, 90 or 95 % of the responses, over without. Median of five draws."""
    found = []
    for names, paper in PAIRS.items():
        ours = median(_gain(names, seed) for seed in range(DRAWS))
        rollout, train = WORKLOADS[WORKLOAD_OF[names[0]]]
        remark = REMARK.format(cap=max(1.0, 2 * rollout / (rollout + train))) if names[0] == names[1] else ""
        name = f"throughput with migration, {' + '.join(names)}"
        found.append(Figure(claim="R5", name=name, paper=paper, ours=ours, unit="x", basis="assumed", remark=remark))
    return found
