"""The paper's tables as numbers: jobs, switch times, sync. RollMux, arXiv 2512.11306v2; seconds, GB, USD per GPU-hour."""

from __future__ import annotations

import msgspec

from verl_mux.placement.estimator import LinkModel
from verl_mux.placement.model import Estimate, JobSpec

# bf16 weights: 2 bytes per parameter of Qwen2.5-7B/14B/32B, Qwen3-4B/8B.
WEIGHTS_GB = {"4B": 8.0, "7B": 15.2, "8B": 16.4, "14B": 29.5, "32B": 65.5}


class Start(msgspec.Struct, frozen=True):
    """Figure 4: seconds to start a phase of this model on a node of eight, from host memory and from nothing."""

    rollout_warm: float
    train_warm: float
    rollout_cold: float
    train_cold: float


# 4B and 8B are not in figure 4: they count as the next model there (3B and 7B).
STARTS = {
    "4B": Start(0.8, 1.9, 25.3, 26.7),
    "7B": Start(0.9, 4.1, 38.8, 32.7),
    "8B": Start(0.9, 4.1, 38.8, 32.7),
    "14B": Start(1.8, 4.7, 60.4, 59.0),
    "32B": Start(1.7, 5.9, 81.7, 81.2),
}

# Figure 2, seconds of (rollout, train); S single-turn, M multi-turn. Totals are printed, splits read off the vector figure.
WORKLOADS = {
    "7B-8K-S": (134.0, 113.0), "8B-8K-M": (310.0, 120.0), "8B-16K-M": (580.0, 241.0), "14B-8K-S": (238.0, 197.0),
    "4B-4K-M": (121.0, 51.0), "4B-16K-M": (496.0, 180.0), "32B-8K-S": (267.0, 271.0), "8B-32K-M": (888.0, 559.0),
    "7B-4K-S": (80.0, 77.0), "4B-8K-M": (262.0, 87.0),
}  # fmt: skip


def make_job(
    name: str,
    model: str,
    rollout_s: float,
    train_s: float,
    nodes: tuple[int, int] = (1, 1),
    cold: bool = False,
    free: bool = False,
) -> JobSpec:
    """A job of `model` on `nodes` (rollout, training) nodes of eight, with the paper's own switch and sync times.

    cold: every switch is a cold start. free: switches and syncs take no time.
    """
    start = STARTS[model]
    switch = (start.rollout_cold, start.train_cold) if cold else (start.rollout_warm, start.train_warm)
    sync_s = LinkModel().two_stage_s(WEIGHTS_GB[model], 8 * nodes[0], nodes[0])
    return JobSpec(
        name=name,
        rollout=Estimate(seconds=rollout_s),
        train=Estimate(seconds=train_s),
        sync_s=0.0 if free else sync_s,
        rollout_switch_s=0.0 if free else switch[0],
        train_switch_s=0.0 if free else switch[1],
        rollout_nodes=nodes[0],
        train_nodes=nodes[1],
    )
