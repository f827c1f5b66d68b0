"""R5: long-tail migration, from the response lengths of figure 11, planned ahead for a group: at which threshold,
on how many nodes.

The rollout decides at run time, from the requests it has, with `rollout/control/replica_plan.py`; the very same function is
asked here about a rollout of expected lengths. Its answer becomes a job's `tail_s`: the time its rollout no longer
holds its nodes. While the tail runs, the next job has only the nodes that were freed; so of a tail of t seconds that
keeps k of n nodes, (n - k) / n of it count as freed, and node-seconds are the same. Called by __main__.py; pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from research.paper.figure import Figure
from research.paper.schedules import grouped
from research.paper.testbed import WORKLOADS, make_job
from research.workload.varying import Cdf, length_at, read_lengths
from verl_mux.placement.feasibility import TOLERANCE
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.model import Estimate, Group, JobSpec, Pin
from verl_mux.rollout.control.replica_plan import EngineSpeed, Migration, MigrationPolicy, Replica, Request, plan

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
MAX_TOKENS = 10**9  # of one replica: no limit, the requests are


class Engines(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout's replicas, all alike, one a node. max_requests: what one can run at once."""

    replicas: int
    max_requests: int = 256
    speed: EngineSpeed


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """A planned migration. threshold: share of responses done when it starts. kept, nodes: nodes that keep the tail,
    and all. rollout_s: the whole rollout with it; before_s: without. tail_s: from the migration to the last response.
    reprefill_tokens: computed twice. gain_node_s: node-seconds won, re-prefill and longer tail paid."""

    threshold: float
    kept: int
    nodes: int
    rollout_s: float
    before_s: float
    tail_s: float
    reprefill_tokens: int
    gain_node_s: float

    @property
    def freed_s(self) -> float:
        """Seconds of all nodes that the tail gives away."""
        return self.tail_s * (self.nodes - self.kept) / self.nodes


def plan_tails(
    lengths: Sequence[int],
    prompt_tokens: int,
    engines: Engines,
    thresholds: Iterable[float] = THRESHOLDS,
    policy: MigrationPolicy | None = None,
) -> list[Tail]:
    """What the rollout would do at each threshold if its responses got these lengths, in tokens; without those at which
    moving does not pay. policy: its threshold is replaced by each of `thresholds` in turn.
    """
    policy = policy or MigrationPolicy()
    tried = (MigrationPolicy(threshold, policy.min_gain_s, policy.max_slowdown) for threshold in thresholds)
    return [tail for each in tried if (tail := _tail(lengths, prompt_tokens, engines, each))]


def _tail(lengths: Sequence[int], prompt_tokens: int, engines: Engines, policy: MigrationPolicy) -> Tail | None:
    at, requests = _run_until(policy.threshold, lengths, engines)
    replicas = [
        Replica(
            id=f"{i}",
            nodes=(f"{i}",),
            requests=tuple(Request(f"{i}.{k}", prompt_tokens + int(done), left) for k, (done, left) in enumerate(running)),
            max_requests=engines.max_requests,
            max_tokens=MAX_TOKENS,
        )
        for i, running in enumerate(requests)
    ]
    done = math.ceil(policy.threshold * len(lengths))
    wanted = [node for replica in replicas for node in replica.nodes]
    answer = plan(replicas, done, len(lengths), wanted, engines.speed, policy)
    if not isinstance(answer, Migration):
        return None
    return Tail(
        threshold=policy.threshold,
        kept=len(answer.kept),
        nodes=engines.replicas,
        rollout_s=at + answer.tail_s,
        before_s=at + answer.tail_before_s,
        tail_s=answer.tail_s,
        reprefill_tokens=answer.reprefill_tokens,
        gain_node_s=answer.gain_s,
    )


def _run_until(threshold: float, lengths: Sequence[int], engines: Engines) -> tuple[float, list[list[tuple[float, float]]]]:
    """(seconds, per replica the tokens done and left of each running request) when that share of responses is done.

    Responses are dealt out in turn; a token of every running request costs a step, which gets cheaper as they end.
    """
    dealt = [sorted(lengths[i :: engines.replicas]) for i in range(engines.replicas)]
    speed = engines.speed
    ends = sorted(end for held in dealt for end in _ends(held, speed))
    at = ends[math.ceil(threshold * len(lengths)) - 1]
    return at, [_left(held, at, speed) for held in dealt]


def _ends(held: Sequence[int], speed: EngineSpeed) -> list[float]:
    now, tokens, ends = 0.0, 0, []
    for ended, length in enumerate(held):
        now += (length - tokens) * (speed.step_s + speed.step_per_request_s * (len(held) - ended))
        tokens = length
        ends.append(now)
    return ends


def _left(held: Sequence[int], at: float, speed: EngineSpeed) -> list[tuple[float, float]]:
    now, tokens = 0.0, 0.0
    for ended, length in enumerate(held):
        step = speed.step_s + speed.step_per_request_s * (len(held) - ended)
        if now + (length - tokens) * step > at + 1e-9:
            tokens += (at - now) / step
            return [(tokens, other - tokens) for other in held[ended:]]
        now, tokens = now + (length - tokens) * step, length
    return []


def with_tail(job: JobSpec, tail: Tail) -> JobSpec:
    """The job with its tail migrated: a longer rollout, if moving costs time, of which the end frees the nodes."""
    longer = job.rollout.seconds * tail.rollout_s / tail.before_s
    freed = min(tail.freed_s * job.rollout.seconds / tail.before_s, longer)
    bound = None if job.rollout.bound_s is None else max(job.rollout.bound_s, longer)
    rollout = Estimate(seconds=longer, bound_s=bound, source=job.rollout.source)
    solo_s = job.solo_s if job.solo_s is not None else job.iteration_s
    return msgspec.structs.replace(job, rollout=rollout, tail_s=freed, solo_s=solo_s)


def choose_tails(group: Group, tails: Mapping[str, Sequence[Tail]]) -> tuple[Group, dict[str, Tail]]:
    """Which jobs of the group migrate their tails, and at which threshold: what brings down the sum of periods over the
    jobs' times alone, and no job beyond an SLO that it kept before. Returns the group with their times, and the choice.

    Improves one job's choice at a time, from no job migrating and from all jobs migrating at one threshold.
    """
    starts = [{}] + [
        {name: options[min(i, len(options) - 1)] for name, options in tails.items() if options} for i in range(len(THRESHOLDS))
    ]
    late = _late(group)
    found = [_improved(group, tails, start, late) for start in starts]
    slowness, chosen = min(found, key=lambda each: (each[0], len(each[1])))
    if slowness >= _slowness(group) - 1e-9:
        chosen = {}
    return _replaced(group, chosen), chosen


def _improved(
    group: Group, tails: Mapping[str, Sequence[Tail]], chosen: dict[str, Tail], late: set[str]
) -> tuple[float, dict[str, Tail]]:
    least = _judged(group, chosen, late)
    better = True
    while better:
        better = False
        for name, options in tails.items():
            for option in (None, *options):
                tried = {**{n: t for n, t in chosen.items() if n != name}, **({name: option} if option else {})}
                if (slowness := _judged(group, tried, late)) < least - 1e-9:
                    least, chosen, better = slowness, tried, True
    return least, chosen


def _judged(group: Group, chosen: Mapping[str, Tail], late: set[str]) -> float:
    tried = _replaced(group, chosen)
    return _slowness(tried) if _late(tried) <= late else math.inf


def _replaced(group: Group, tails: Mapping[str, Tail]) -> Group:
    pins = tuple(
        Pin(job=with_tail(pin.job, tails[pin.job.name]), rollout=pin.rollout, train=pin.train) if pin.job.name in tails else pin
        for pin in group.pins
    )
    return msgspec.structs.replace(group, pins=pins)


def _slowness(group: Group) -> float:
    periods = group_periods(group)
    return sum(periods[job.name].mean_s / _alone(job) for job in group.jobs)


def _late(group: Group) -> set[str]:
    periods = group_periods(group)
    return {job.name for job in group.jobs if periods[job.name].mean_s > job.limit_s * TOLERANCE}


def _alone(job: JobSpec) -> float:
    return job.iteration_s if job.solo_s is None else job.solo_s


RESPONSES, PROMPT_TOKENS, DRAWS = 256, 512, 5
# A full batch of 32 a GPU makes a decoding step half as long again; a replica prefills 5000 tokens a second.
BATCH_SHARE, PREFILL = 0.5, 5000.0
WORKLOAD_OF = {"7B-4k": "7B-4K-S", "7B-8k": "7B-8K-S", "14B-8k": "14B-8K-S"}
PAIRS = {("7B-4k", "7B-4k"): 1.12, ("7B-8k", "7B-8k"): 1.19, ("7B-8k", "14B-8k"): 1.06, ("14B-8k", "14B-8k"): 1.28}
REMARK = (
    "the paper gives neither batch nor phase times nor how many GPUs keep the tail; with figure 2's phase times two equal"
    " jobs cannot gain more than {cap:.2f}"
)


def draw_lengths(cdf: Cdf, count: int, rng: random.Random) -> list[int]:
    """`count` lengths in tokens."""
    return [max(1, round(length_at(cdf, rng.random()))) for _ in range(count)]


def planned_tails(workload: str, seed: int) -> list[Tail]:
    """One rollout on eight GPUs, decoding so fast that it takes the time of figure 2."""
    drawn = draw_lengths(read_lengths()[workload], RESPONSES, random.Random(f"{workload} {seed}"))
    step_s = WORKLOADS[WORKLOAD_OF[workload]][0] / max(drawn)
    speed = EngineSpeed(prefill=PREFILL, step_s=step_s, step_per_request_s=BATCH_SHARE * step_s / (RESPONSES / 8))
    # The paper sets no limit to how much longer the tail may take.
    policy = MigrationPolicy(max_slowdown=1.0)
    return plan_tails(drawn, PROMPT_TOKENS, Engines(replicas=8, speed=speed), thresholds=(0.8, 0.9, 0.95), policy=policy)


def _pair(names: tuple[str, str]) -> Group:
    jobs = [make_job(f"{i}", name.partition("-")[0], *WORKLOADS[WORKLOAD_OF[name]]) for i, name in enumerate(names)]
    return grouped({job.name: (job, ("r1",), ("t1",)) for job in jobs})


def _gain(names: tuple[str, str], seed: int) -> float:
    group = _pair(names)
    tails = {f"{i}": planned_tails(name, seed) for i, name in enumerate(names)}
    migrated, _ = choose_tails(group, tails)
    return _steps_per_s(migrated) / _steps_per_s(group)


def _steps_per_s(group: Group) -> float:
    return sum(1 / period.mean_s for period in group_periods(group).values())


def migrations() -> list[Figure]:
    """Steps per second of the pair with migration at 80, 90 or 95 % of the responses, over without. Median of five draws."""
    found = []
    for names, paper in PAIRS.items():
        ours = median(_gain(names, seed) for seed in range(DRAWS))
        rollout, train = WORKLOADS[WORKLOAD_OF[names[0]]]
        cap = max(1.0, 2 * rollout / (rollout + train))
        name = f"throughput with migration, {' + '.join(names)}"
        remark = REMARK.format(cap=cap) if names[0] == names[1] else ""
        found.append(Figure(claim="R5", name=name, paper=paper, ours=ours, unit="x", basis="assumed", remark=remark))
    return found
