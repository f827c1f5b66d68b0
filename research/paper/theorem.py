"""R11: in a group that is not saturated, every job iterates once per cycle of the longest one. One rollout and one training
node, and what becomes of it with two rollout nodes."""

from __future__ import annotations

import random

from research.paper.figure import Figure
from verl_mux.placement.group_run import planned_run, settle
from verl_mux.placement.model import Estimate, JobSpec

GROUPS = 10_000


def draw_group(rng: random.Random, rollout_nodes: int) -> tuple[list[JobSpec], list[int]] | None:
    """Two to five jobs, each on one of the rollout nodes (as bits) and all on one training node; None where T_load is not
    below T_cycle."""
    count = rng.randint(2, 5)
    jobs = [_job(i, rng.uniform(1, 100), rng.uniform(1, 100)) for i in range(count)]
    on = [1 << rng.randrange(rollout_nodes) for _ in jobs]
    load = max(
        sum(j.train.seconds for j in jobs), *(sum(j.rollout.seconds for j, o in zip(jobs, on, strict=True) if o == n) for n in on)
    )
    return (jobs, on) if load < max(job.iteration_s for job in jobs) else None


def _job(number: int, rollout_s: float, train_s: float) -> JobSpec:
    return JobSpec(name=f"j{number}", rollout=Estimate(seconds=rollout_s), train=Estimate(seconds=train_s))


def slowest(jobs: list[JobSpec], on: list[int]) -> float:
    """The longest settled period over T_cycle, from the events."""
    settled = settle(planned_run(jobs, on, [1 << 8] * len(jobs), "fifo"))
    return max(period.mean_s for period in settled) / max(job.iteration_s for job in jobs)


def violations(rollout_nodes: int, groups: int = GROUPS) -> tuple[int, float, str]:
    """(groups of which a job needs longer than T_cycle, the worst ratio, the smallest such group in words)."""
    rng, found, worst, example = random.Random(11), [], 1.0, ""
    checked = 0
    while checked < groups:
        if not (drawn := draw_group(rng, rollout_nodes)):
            continue
        checked += 1
        if (ratio := slowest(*drawn)) > 1 + 1e-6:
            found.append(drawn)
            worst = max(worst, ratio)
    if found:
        jobs, on = min(found, key=lambda drawn: (len(drawn[0]), -slowest(*drawn)))
        example = _in_words(jobs, on)
    return len(found), worst, example


def _in_words(jobs: list[JobSpec], on: list[int]) -> str:
    each = (f"{j.rollout.seconds:.0f}+{j.train.seconds:.0f} s on r{o.bit_length()}" for j, o in zip(jobs, on, strict=True))
    return f"e.g. {', '.join(each)}: {slowest(jobs, on):.2f} T_cycle"


def theorem_1() -> list[Figure]:
    """How many of 10,000 random unsaturated groups break it."""
    one, _, _ = violations(1)
    two, worst, example = violations(2)
    return [
        Figure(claim="R11", name="1 rollout node: groups slower than T_cycle, of 10,000", paper=0.0, ours=one),
        Figure(
            claim="R11", name="2 rollout nodes: groups slower than T_cycle, of 10,000", paper=0.0, ours=two,
            remark=f"the paper proves one node and asserts the rest; {example}",
        ),
        Figure(claim="R11", name="2 rollout nodes: slowest job of all", paper=None, ours=worst, unit="T_cycle"),
    ]  # fmt: skip
