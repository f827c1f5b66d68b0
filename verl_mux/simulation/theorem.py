"""Theorem 1 of the paper, put to the test: in an unsaturated group round-robin FIFO gives every job the period T_cycle.

Holds for one rollout node and one training node (RollMux, arXiv 2512.11306v2, appendix). It does not carry over to
several rollout nodes; `counter_example` finds a group that shows it. Periods come from the events of FIFO queues, not
from the closed form that scheduling/periods.py uses where the theorem holds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from verl_mux.scheduling.model import Estimate, Group, JobSpec, Pin, cycle_time, load_time
from verl_mux.scheduling.periods import masks
from verl_mux.scheduling.settled import mean_periods

TOLERANCE = 1e-9


class Check(msgspec.Struct, frozen=True):
    """groups: unsaturated ones tried. violations: groups with a job whose period is not T_cycle. worst: the largest
    relative difference."""

    groups: int
    violations: int
    worst: float


def check_one_by_one(groups: int = 10_000, seed: int = 0) -> Check:
    """Random unsaturated groups of 2 to 5 jobs on one node a side."""
    rng = random.Random(seed)
    violations, worst = 0, 0.0
    for _ in range(groups):
        group = next(unsaturated(rng, rollout_nodes=1))
        off = max(abs(period / cycle_time(group) - 1) for period in _periods(group))
        violations += off > TOLERANCE
        worst = max(worst, off)
    return Check(groups, violations, worst)


class CounterExample(msgspec.Struct, frozen=True):
    """An unsaturated group in which somebody takes longer than T_cycle. periods_s: by job."""

    group: Group
    cycle_s: float
    load_s: float
    periods_s: dict[str, float]

    def __str__(self) -> str:
        jobs = "; ".join(
            f"{pin.job.name}: rollout {pin.job.rollout.seconds:g} s on {'+'.join(pin.rollout)}, train"
            f" {pin.job.train.seconds:g} s, period {self.periods_s[pin.job.name]:g} s"
            for pin in self.group.pins
        )
        return f"T_cycle {self.cycle_s:g} s, T_load {self.load_s:g} s, one training node. {jobs}"


def counter_example(rollout_nodes: int = 2, tries: int = 2000, seed: int = 0) -> CounterExample:
    """The group, of whole seconds and three jobs, that exceeds T_cycle by the largest factor among random ones."""
    rng = random.Random(seed)
    worst, found = 1.0, None
    for _ in range(tries):
        group = next(unsaturated(rng, rollout_nodes, count=3))
        periods, cycle = _periods(group), cycle_time(group)
        if max(periods) / cycle > worst:
            names = [job.name for job in group.jobs]
            worst = max(periods) / cycle
            found = CounterExample(group, cycle, load_time(group), dict(zip(names, periods, strict=True)))
    assert found is not None
    return found


def unsaturated(rng: random.Random, rollout_nodes: int, count: int | None = None) -> Iterator[Group]:
    """Endless random groups with T_load < T_cycle, every rollout node used."""
    while True:
        nodes = tuple(f"r{i}" for i in range(rollout_nodes))
        pins = tuple(_pin(f"j{i + 1}", nodes, rng) for i in range(count or rng.randint(2, 5)))
        group = Group(name="g", pins=pins, rollout_nodes=nodes, train_nodes=("t0",))
        if {node for pin in pins for node in pin.rollout} == set(nodes) and load_time(group) < cycle_time(group):
            yield group


def _pin(name: str, nodes: tuple[str, ...], rng: random.Random) -> Pin:
    rollout, train = (Estimate(seconds=rng.randint(5, 300)) for _ in range(2))
    on = rng.sample(nodes, rng.randint(1, len(nodes)))
    job = JobSpec(name=name, rollout=rollout, train=train, rollout_nodes=len(on))
    return Pin(job=job, rollout=tuple(sorted(on)), train=("t0",))


def _periods(group: Group) -> list[float]:
    rollout, train = masks(group)
    return mean_periods(group.jobs, rollout, train)
