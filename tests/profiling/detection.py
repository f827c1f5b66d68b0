"""`python -m tests.profiling.detection --runs 200`: how often the report names planted faults, how often it accuses healthy runs.

The generator (blind/) was written before its author had seen how the report judges. A fault is named by a finding of the right
kind, job and place (replica or node) whose step is one of the fault's. A line a run on stdout, the figures at the end.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from math import sqrt
from pathlib import Path
from typing import Any

from tests.profiling.blind.runs import draw, write
from tests.profiling.blind.shapes import ASYNC_KINDS, KINDS, MODES, Fault, Run
from verl_mux.profiling.plain.lines import find_log_files
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.input.run_log import read_files
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import find_all

NAMES = {
    "slow_replica": "straggler",
    "slow_node": "straggler",
    "stalled_replica": "silent_gap",
    "slow_tool": "tool_wait",
    "slow_reward": "reward_wait",
    "kv_starvation": "kv_starvation",
}


def found_in(run: Run) -> list[Finding]:
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), run)
        return find_all(Analysis(read_files(directory, find_log_files(directory))))


def is_named(fault: Fault, findings: list[Finding]) -> bool:
    """Is it named: kind, place, step, job?"""
    return any(_right(fault, finding) for finding in findings)


def _right(fault: Fault, it: Finding) -> bool:
    if it.kind != NAMES[fault.kind] or fault.job not in (None, it.job):
        return False
    if it.step is None or not fault.first <= it.step <= fault.last:
        return False
    if fault.kind == "slow_node":
        return it.node == fault.target
    return fault.kind == "slow_tool" or fault.target in (None, it.replica, *it.evidence.get("replicas", []))


def kind_of(number: int) -> tuple[str, str]:
    """Mode and fault of the number-th run with one: every pair in turn."""
    mode = MODES[number % len(MODES)]
    kinds = ASYNC_KINDS if mode == "async" else KINDS
    return mode, kinds[number // len(MODES) % len(kinds)]


def interval(hits: int, total: int) -> list[float]:
    """Wilson's, 95 %."""
    if not total:
        return [0.0, 1.0]
    z, p = 1.96, hits / total
    middle, half = p + z * z / 2 / total, z * sqrt(p * (1 - p) / total + z * z / 4 / total**2)
    return [round((middle + sign * half) / (1 + z * z / total), 4) for sign in (-1, 1)]


def judge(seed: int, mode: str, kind: str | None) -> dict[str, Any]:
    """One run, drawn, written, reported on."""
    run = draw(seed, mode, kind)
    findings = found_in(run)
    told = [[f.kind, f.job, f.step, f.node if f.replica is None else f.replica, round(f.cost_s, 1), f.text] for f in findings]
    right = not findings if run.fault is None else is_named(run.fault, findings)
    return {"seed": seed, "mode": mode, "fault": run.fault and vars(run.fault), "right": right, "findings": told}


def measure(runs: int, seed: int) -> dict[str, Any]:
    """`runs` with a fault and as many healthy ones."""
    seen: Counter[str] = Counter()
    for number in range(runs):
        mode, kind = kind_of(number)
        for fault in (kind, None):
            told = judge(seed + number, mode, fault)
            print(json.dumps(told), flush=True)
            for key in (str(fault), f"{fault} {mode}", "healthy" if fault is None else "faulty"):
                seen[key] += 1
                seen[f"{key}: right"] += told["right"]
    figures = {key: [seen[f"{key}: right"], count] for key, count in sorted(seen.items()) if ": " not in key}
    named, well = figures["faulty"], figures["healthy"]
    accused = [well[1] - well[0], well[1]]
    return {"named": [*named, *interval(*named)], "accused": [*accused, *interval(*accused)], "by": figures}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1000)
    given = parser.parse_args()
    print(json.dumps(measure(given.runs, given.seed)))
