"""What a run is made of, and how it is drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass

MODES = ("plain", "oversampled", "segmented", "migrated", "multiplexed", "async")
KINDS = ("slow_replica", "stalled_replica", "slow_tool", "slow_reward", "kv_starvation", "slow_node")
# verl's own modes log neither replicas nor engines, so no reader could name those.
ASYNC_KINDS = ("slow_tool", "slow_reward")


@dataclass(frozen=True)
class Fault:
    """What was planted. job: whose; None: all jobs. target: a replica, a node, a tool or None. strength: a factor, or seconds
    for a stall, or the part of the KV cache that is left. cost: what its steps take beyond the twin's, as a share of that."""

    kind: str
    job: str | None
    target: int | str | None
    first: int
    last: int
    strength: float
    cost: float = 0.0

    def on(self, kind: str, job: str, step: int) -> bool:
        return self.kind == kind and self.job in (None, job) and self.first <= step <= self.last


@dataclass(frozen=True)
class Run:
    """Everything of a run that is not drawn from its seed request by request; sizes, seconds, tokens."""

    seed: int
    mode: str
    steps: int
    nodes: int
    on_node: int  # replicas
    prompts: int
    samples: int
    mean_tokens: float
    spread: float
    drift: float  # mean length at the end, as a multiple of that at the beginning
    longest: int
    fixed_s: float
    each_s: float
    kv_tokens: int
    slots: int
    tools: tuple[tuple[str, float], ...]  # name, median seconds
    reward_s: float
    train_s: float  # for a thousand tokens
    sync_s: float
    save_every: int
    test_every: int
    rate: float
    overlap: bool  # async: engines go on while the trainer trains
    fault: Fault | None = None

    @property
    def jobs(self) -> tuple[str, ...]:
        return ("a", "b") if self.mode in ("migrated", "multiplexed") else ("a",)


def draw_run(rng: random.Random, seed: int, mode: str, kind: str | None) -> Run:
    nodes = rng.choice((2, 2, 3, 4)) if mode in ("migrated",) or kind == "slow_node" else rng.choice((1, 2, 2, 3, 4))
    on_node = rng.choice((1, 2)) if nodes > 1 and kind != "slow_node" else 2
    mean = rng.uniform(250, 900)
    prompts = max(8, nodes * on_node * rng.choice((2, 3, 4)))
    with_tools = rng.random() < 0.4 or kind == "slow_tool"
    names = rng.sample(("search", "python", "calculator", "browser"), rng.choice((1, 2, 3)))
    samples = rng.choice((4, 4, 4, 8))
    # A limit that some per cent of the answers reach; without one the tail itself would be what a reader should be told.
    longest = int(mean * rng.uniform(1.8, 3.0))
    at_once = prompts * samples / (nodes * on_node)
    fixed, each = rng.uniform(0.01, 0.03), rng.uniform(0.0001, 0.0005)
    share = rng.uniform(0.2, 0.8)
    pace = fixed + each * at_once
    return Run(
        seed=seed, mode=mode, steps=rng.randint(10, 16), nodes=nodes, on_node=on_node, prompts=prompts, samples=samples,
        mean_tokens=mean, spread=rng.uniform(0.2, 0.5), drift=rng.uniform(0.8, 1.5), longest=longest,
        fixed_s=fixed, each_s=each,
        kv_tokens=int(at_once * (mean * 6 + 2000)), slots=256,
        tools=tuple((name, max(0.05, rng.uniform(0.01, 0.03) * mean * pace)) for name in names) if with_tools else (),
        reward_s=rng.choice((0.02, 0.1, 0.4)), train_s=share * 1300 * pace / at_once, sync_s=rng.uniform(0.3, 2.0),
        save_every=rng.choice((0, 4, 5)), test_every=rng.choice((0, 4, 5)), rate=rng.choice((0.15, 0.25, 0.5)),
        overlap=rng.random() < 0.5,
    )  # fmt: skip


def draw_fault(rng: random.Random, run: Run, kind: str) -> Fault:
    """Faults of machines begin somewhere and stay, or go away after some steps; a stall is one or two steps'."""
    first = rng.randint(2, run.steps - 3)
    last = first if kind == "stalled_replica" else rng.choice((run.steps, min(run.steps, first + rng.randint(3, 6))))
    job: str | None = rng.choice(run.jobs)
    if run.mode == "migrated" and kind in ("slow_replica", "stalled_replica"):
        job = "a"
    own = run.nodes * run.on_node
    drawn: dict[str, tuple[int | str | None, float]] = {
        "slow_replica": (rng.randrange(own), rng.uniform(1.5, 3.0)),
        "stalled_replica": (rng.randrange(own), rng.uniform(0.4, 2.0) * run.mean_tokens * 2 * (run.fixed_s + 16 * run.each_s)),
        "slow_tool": (run.tools and rng.choice(run.tools)[0] or None, rng.uniform(6, 20)),
        "slow_reward": (None, rng.uniform(3, 12) / run.reward_s),
        "kv_starvation": (rng.choice((None, None, rng.randrange(own))), rng.uniform(0.08, 0.25)),
        "slow_node": (f"r{rng.randrange(run.nodes)}", rng.uniform(1.5, 3.0)),
    }
    if kind == "slow_node":
        job = None
    if kind == "kv_starvation" and job == "b" and run.mode == "migrated":
        drawn[kind] = (None, drawn[kind][1])
    return Fault(kind, job, drawn[kind][0], first, last, drawn[kind][1])
