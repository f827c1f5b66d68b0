"""Orders within a group, on random unsaturated groups over several rollout nodes, where FIFO is not optimal."""

from __future__ import annotations

import random
from statistics import fmean

import msgspec

from verl_mux.scheduling.feasibility import TOLERANCE
from verl_mux.scheduling.model import cycle_time
from verl_mux.scheduling.order import ORDERS
from verl_mux.scheduling.periods import masks, periods
from verl_mux.simulation.theorem import unsaturated


class OrderStudy(msgspec.Struct, frozen=True):
    """feasible: share of the groups in which every job keeps its SLO, by order; `any` of them. improved: share in which
    another order does and FIFO does not. beyond_cycle: share in which somebody exceeds T_cycle, by order."""

    groups: int
    feasible: dict[str, float]
    improved: float
    beyond_cycle: dict[str, float]


def compare_orders(groups: int = 1000, rollout_nodes: int = 2, seed: int = 0) -> OrderStudy:
    """SLOs are drawn from U(1, 2)."""
    rng = random.Random(seed)
    feasible: dict[str, list[bool]] = {name: [] for name in (*ORDERS, "any")}
    beyond: dict[str, list[bool]] = {name: [] for name in ORDERS}
    for _ in range(groups):
        group = next(unsaturated(rng, rollout_nodes))
        slos = [rng.uniform(1, 2) for _ in group.jobs]
        rollout, train = masks(group)
        kept = []
        for name in ORDERS:
            settled = [period.mean_s for period in periods(group.jobs, rollout, train, name)]
            limits = [slo * job.iteration_s * TOLERANCE for slo, job in zip(slos, group.jobs, strict=True)]
            kept.append(all(period <= limit for period, limit in zip(settled, limits, strict=True)))
            feasible[name].append(kept[-1])
            beyond[name].append(max(settled) > cycle_time(group) * TOLERANCE)
        feasible["any"].append(any(kept))
    return OrderStudy(
        groups=groups,
        feasible={name: fmean(values) for name, values in feasible.items()},
        improved=fmean(a and not f for a, f in zip(feasible["any"], feasible["fifo"], strict=True)),
        beyond_cycle={name: fmean(values) for name, values in beyond.items()},
    )
