"""`verl-mux bench chaos --simulated N`: the protocol's model, played from fixed seeds; the figures of it."""

from __future__ import annotations

from typing import Any

from bench.protocol_model.explore import PLANTED, explore
from bench.protocol_model.kill_points import POINTS, TYPES, kill_at_each
from bench.protocol_model.partitions import cut_off

KILL_SEEDS = 20
PARTITIONS = 1_000
PLANTED_SCHEDULES = 200


def simulate(schedules: int, seed: int, plant: str = "") -> dict[str, Any]:
    """`violations`: of everything but the planted faults, which are counted by themselves: a measure that finds none of one of
    them measures nothing. With `plant`, that fault is everywhere."""
    found = explore(schedules, seed, plant)
    kills = kill_points(KILL_SEEDS, plant)
    partitions = cut_off(PARTITIONS, 1, plant)
    counts = found.violations + kills.pop("counts") + partitions.violations
    return {
        "schedules": schedules,
        "violations": counts.total(),
        "by_violation": dict(counts),
        "seeds": f"{seed} to {seed + schedules - 1}",
        "violating_seeds": found.seeds[:10],
        "kill_points": kills,
        "partitions": {
            "partitions": partitions.partitions,
            "calls_after_expiry": partitions.late_calls,
            "accepted_after_expiry": partitions.accepted,
            "violations": partitions.violations.total(),
            "violating_seeds": partitions.seeds[:10],
        },
        "planted": {} if plant else planted(PLANTED_SCHEDULES),
        "by_fault": {kind: {"injected": count} for kind, count in sorted(found.faults.items())},
    }


def kill_points(seeds: int, plant: str = "") -> dict[str, Any]:
    found = kill_at_each(range(1, seeds + 1), plant)
    return {
        "schedules": found.schedules,
        "types": len(TYPES),
        "points": list(POINTS),
        "seeds": f"1 to {seeds}",
        "kills": found.kills.total(),
        "violations": found.violations.total(),
        "violating": found.again[:10],
        "counts": found.violations,
    }


def planted(schedules: int) -> dict[str, int]:
    """Violations in `schedules` schedules from seed 1, for each planted fault."""
    return {fault: explore(schedules, 1, fault).violations.total() for fault in PLANTED}
