"""`verl-mux bench chaos --simulated N`: the protocol's model, played from fixed seeds; the figures of it."""

from __future__ import annotations

from typing import Any

from bench.protocol_model.schedules import PLANTED, POINTS, TYPES, cut_off, explore, kill_at_each

KILL_SEEDS = 20
PARTITIONS = 1_000
PLANTED_SCHEDULES = 200


def simulate(schedules: int, seed: int, plant: str = "") -> dict[str, Any]:
    """`violations`: of everything but the planted faults, which are counted by themselves: a measure that finds none of one of
    them measures nothing. With `plant`, that fault is everywhere."""
    found = explore(schedules, seed, plant)
    kills = kill_at_each(range(1, KILL_SEEDS + 1), plant)
    partitions = cut_off(PARTITIONS, 1, plant)
    counts = found.violations + kills.violations + partitions.violations
    return {
        "schedules": schedules,
        "violations": counts.total(),
        "by_violation": dict(counts),
        "seeds": f"{seed} to {seed + schedules - 1}",
        "violating_seeds": found.again[:10],
        "kill_points": {
            "schedules": kills.schedules,
            "types": len(TYPES),
            "points": list(POINTS),
            "seeds": f"1 to {KILL_SEEDS}",
            "kills": kills.faults["coordinator killed"],
            "violations": kills.violations.total(),
            "violating": kills.again[:10],
        },
        "partitions": {
            "partitions": partitions.faults["network cut"],
            "calls_after_expiry": partitions.faults["stale calls"],
            "accepted_after_expiry": partitions.violations["mapped after expiry"],
            "violations": partitions.violations.total(),
            "violating_seeds": partitions.again[:10],
        },
        "planted": {} if plant else {it: explore(PLANTED_SCHEDULES, 1, it).violations.total() for it in PLANTED},
        "by_fault": {kind: {"injected": count} for kind, count in sorted(found.faults.items())},
    }
