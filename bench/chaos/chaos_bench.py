"""`verl-mux bench chaos`: what becomes of leases when processes, connections and disks fail.

Runs on the command line; starts the schedules and prints.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.chaos.judge import Verdict, judge
from bench.chaos.kills import deaths, reached, run_kills
from bench.chaos.schedule import run_schedule
from bench.measuring import AsJson, quantile, show
from bench.protocol_model.schedules import PLANTED, POINTS, TYPES, cut_off, explore, kill_at_each, run
from verl_mux.errors import UserError

# Of --simulated.
KILL_SEEDS = 20
PARTITIONS = 1_000
PLANTED_SCHEDULES = 200


def bench_chaos(
    schedules: Annotated[int, typer.Option(help="How many schedules of real processes.")] = 20,
    seconds: Annotated[float, typer.Option(help="How long one is.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the first schedule; each further one has the next.")] = 1,
    side_by_side: Annotated[int | None, typer.Option(help="Schedules at once; default: one a core.", min=1)] = None,
    plant: Annotated[str, typer.Option(help=f"A fault that must be noticed: {', '.join(PLANTED)}.")] = "",
    simulated: Annotated[
        int,
        typer.Option(
            help="Run this many schedules of the protocol's model instead of real processes (20 ms each; 1: tell its story).",
            min=0,
        ),
    ] = 0,
    kills: Annotated[
        int,
        typer.Option(help="Kill it this many times at each point of each type of message instead (20: half an hour).", min=0),
    ] = 0,
    keep: Annotated[Path | None, typer.Option(help="Keep what the processes wrote, in this new folder.")] = None,
    json: AsJson = False,
) -> None:
    """Kill, stop and cut off a real coordinator and real jobs at random, and count what they did wrong."""
    if schedules < 1 or seconds < 10:
        raise UserError(f"--schedules {schedules} --seconds {seconds:g}: at least 1 schedule of 10 s is needed")
    if plant and plant not in PLANTED:
        raise UserError(f"--plant is {plant!r}; allowed: {', '.join(PLANTED)}")
    if keep is not None and keep.exists():
        raise UserError(f"--keep {keep} exists; name a new folder")
    if simulated == 1:
        return print("\n".join(run(seed, plant).story))
    if simulated:
        return show(simulate(simulated, seed, plant), json, _in_words)
    at_once = side_by_side or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = (keep or Path(scratch)).absolute()
        if kills:
            result = _kill_everywhere(folder, kills, seed, at_once)
        else:
            result = figures(_run_all(folder, range(seed, seed + schedules), seconds, plant, at_once))
    show(result, json, _in_words)


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


def _run_all(folder: Path, seeds: range, seconds: float, planted: str, at_once: int) -> list[Verdict]:
    def one(seed: int) -> Verdict:
        verdict = judge(run_schedule(folder / f"seed_{seed}", seed, seconds, planted))
        wrong = f"{len(verdict.violations)} violations {sorted(set(verdict.violations)) or ''}"
        print(
            f"seed {seed}: {sum(verdict.faults.values())} faults, {len(verdict.grants_s)} quiet grants, {wrong}", file=sys.stderr
        )
        return verdict

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, seeds))


def _kill_everywhere(folder: Path, times: int, seed: int, at_once: int) -> dict[str, Any]:
    """`reached`: TYPE:POINT -> how often a coordinator died there."""
    points = deaths(times, seed)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        parts = [(folder / f"part_{at}", seed + at, points[at::at_once], ["job0", "job1"]) for at in range(at_once)]
        seen = list(pool.map(lambda part: run_kills(*part), parts))
    died = sum((reached(lines) for lines in seen), Counter())
    return {**figures([judge(lines) for lines in seen]), "kills": died.total(), "reached": dict(sorted(died.items()))}


def figures(verdicts: list[Verdict]) -> dict[str, Any]:
    """`by_fault`: how often each kind came, and the violations that followed it. `back_s`: the longest time from starting the
    coordinator again until it listened."""
    injected: Counter[str] = sum((verdict.faults for verdict in verdicts), Counter())
    after = Counter(kind for verdict in verdicts for _, kind in verdict.violations)
    grants = [seconds for verdict in verdicts for seconds in verdict.grants_s]
    return {
        "schedules": len(verdicts),
        "violations": after.total(),
        "survivor_lost_steps": sum(verdict.lost_steps for verdict in verdicts),
        "grant_p50_ms": _milliseconds(grants, 0.5),
        "grant_p99_ms": _milliseconds(grants, 0.99),
        "grants": len(grants),
        "back_s": round(max((seconds for verdict in verdicts for seconds in verdict.back_s), default=0.0), 2),
        "by_violation": dict(Counter(what for verdict in verdicts for what, _ in verdict.violations)),
        "by_fault": {kind: {"injected": injected[kind], "violations": after[kind]} for kind in sorted({*injected, *after})},
    }


def _milliseconds(seconds: list[float], part: float) -> float | None:
    return round(1000 * quantile(seconds, part), 2) if seconds else None


def _in_words(result: dict[str, Any]) -> str:
    lines = [f"{name}: {value}" for name, value in result.items() if name not in ("by_fault", "reached")]
    lines += [
        f"  {kind}: {of['injected']} times" + (f", {of['violations']} violations after it" if "violations" in of else "")
        for kind, of in result.get("by_fault", {}).items()
    ]
    return "\n".join(lines)
