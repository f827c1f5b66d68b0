"""`python -m tests.profiling.detection --runs 60`: how often the report names planted faults, how often it accuses healthy runs.

The generator (drawn_runs.py) was written from docs/event_log.md, by who had read the report's code.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.profiling import drawn_runs
from tests.profiling.drawn_runs import World
from verl_mux.profiling.plain.files import find_log_files
from verl_mux.profiling.report.findings.all_findings import find_all
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.input.run_log import read_files
from verl_mux.profiling.report.measures.analysis import Analysis

KINDS = {
    "slow_replica": ("straggler",),
    "slow_node": ("straggler",),
    "stalled_replica": ("silent_gap",),
    "slow_tool": ("tool_wait",),
    "slow_reward": ("reward_wait",),
    "kv_starvation": ("kv_starvation",),
}
WHERE_REPLICA = ("slow_replica", "stalled_replica", "kv_starvation")
ONE_STEP = ("stalled_replica", "slow_tool", "slow_reward", "kv_starvation")


def found_in(world: World) -> list[Finding]:
    with tempfile.TemporaryDirectory() as directory:
        drawn_runs.make(Path(directory), world)
        return find_all(Analysis(read_files(directory, find_log_files(directory))))


def is_named(world: World, findings: list[Finding]) -> bool:
    """The right kind, replica or node, and step, of the right job."""
    return any(_right(world, finding) for finding in findings)


def _right(world: World, it: Finding) -> bool:
    if it.kind not in KINDS[world.fault or ""] or it.job != "a":
        return False
    if world.fault in WHERE_REPLICA and world.replica not in it.evidence.get("replicas", [it.replica]):
        return False
    if world.fault == "slow_node" and it.node != world.node:
        return False
    return world.fault not in ONE_STEP or it.step == world.step


def measure(runs: int, seed: int) -> dict[str, Any]:
    """`runs` of each fault, and as many healthy ones as all faults together."""
    named: Counter[str] = Counter()
    missed, accused = [], []
    for fault in drawn_runs.FAULTS:
        for number in range(runs):
            world = drawn_runs.draw(seed + number, fault=fault, mode=drawn_runs.MODES[number % len(drawn_runs.MODES)])
            findings = found_in(world)
            if is_named(world, findings):
                named[fault] += 1
            else:
                told = [(f.kind, f.step, f.replica) for f in findings]
                missed.append([fault, world.mode, world.seed, round(world.strength, 2), told])
    healthy = runs * len(drawn_runs.FAULTS)
    for number in range(healthy):
        world = drawn_runs.draw(seed + 500_000 + number, mode=drawn_runs.MODES[number % len(drawn_runs.MODES)])
        if findings := found_in(world):
            accused.append([world.mode, world.seed, [(f.kind, f.job, f.step, f.text) for f in findings]])
    total = runs * len(drawn_runs.FAULTS)
    return {
        "named": round(sum(named.values()) / total, 4),
        "by_fault": {fault: named[fault] / runs for fault in drawn_runs.FAULTS},
        "accused": round(len(accused) / healthy, 4),
        "runs": [total, healthy],
        "missed": missed,
        "accused_runs": accused,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1000)
    given = parser.parse_args()
    print(json.dumps(measure(given.runs, given.seed), indent=1))
