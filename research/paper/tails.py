"""R5: long-tail migration, from the response lengths of figure 11. The paper leaves most of it open, see `REMARK`."""

from __future__ import annotations

import random
from statistics import median

from research.paper.figure import Figure
from research.paper.planned_migration import Engines, Tail, choose_tails, plan_tails
from research.paper.schedules import grouped
from research.paper.testbed import WORKLOADS, make_job
from research.workload.uncertainty import Cdf, length_at, read_lengths
from verl_mux.placement.group_run import periods_by_job
from verl_mux.placement.model import Group
from verl_mux.rollout.control.replica_plan import EngineSpeed, MigrationPolicy

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
    return sum(1 / period.mean_s for period in periods_by_job(group).values())


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
