"""Jobs of `ranking.py` that take turns on nodes: first come, first served, all nodes of a phase at once. Shares no code with
what-if; writes what such a run would have logged."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from tests.what_if.ranking import EPOCH, Ran, write_log

BEFORE_S, AFTER_S, BETWEEN_S = 0.2, 0.1, 0.3
NODES = {"rollout": ["r0", "r1"], "train": ["t0"]}  # of each job


@dataclass(frozen=True)
class Held:
    job: str
    phase: str
    step: int
    asked: float
    start: float
    end: float


def take_turns(rans: Mapping[str, Ran]) -> list[Held]:
    """All leases of these jobs, that ran alone, when they take turns."""
    held: list[Held] = []
    free = dict.fromkeys(NODES["rollout"] + NODES["train"], 0.0)
    asks = [(0.0, order, job, "rollout", 1) for order, job in enumerate(rans)]
    while asks:
        asked, order, job, phase, step = heapq.heappop(asks)
        began, rolled, ended, _ = rans[job].steps[step - 1]
        seconds = BEFORE_S + rolled - began + AFTER_S if phase == "rollout" else ended - rolled
        start = max(asked, *(free[node] for node in NODES[phase]))
        free |= dict.fromkeys(NODES[phase], start + seconds)
        held.append(Held(job, phase, step, asked, start, start + seconds))
        if phase == "rollout":
            heapq.heappush(asks, (start + seconds, order, job, "train", step))
        elif step < len(rans[job].steps):
            heapq.heappush(asks, (start + seconds + BETWEEN_S, order, job, "rollout", step + 1))
    return held


def makespan(held: Sequence[Held]) -> float:
    return max(it.end for it in held)


def write(rans: Mapping[str, Ran], held: Sequence[Held], directory: Path) -> None:
    """As logged by the jobs and the coordinator."""
    for job, ran in rans.items():
        write_log(_shifted(ran, [it for it in held if it.job == job]), directory, job, NODES["rollout"])
    for step in {it.step for it in held}:
        folder = directory / "coordinator" / "events" / "coordinator" / f"step_{step}"
        folder.mkdir(parents=True)
        lines = [_line(it, number) for number, it in enumerate(held) if it.step == step]
        (folder / "worker_0.jsonl").write_text("".join(line + "\n" for line in lines))


def _shifted(ran: Ran, held: Sequence[Held]) -> Ran:
    rollouts = {it.step: it for it in held if it.phase == "rollout"}
    trained = {it.step: it for it in held if it.phase == "train"}
    later = {step: it.start + BEFORE_S - ran.steps[step - 1][0] for step, it in rollouts.items()}
    stays = [replace(it, start=it.start + later[it.step], end=it.end + later[it.step]) for it in ran.stays]
    steps = [
        (rollouts[number].asked, end + later[number], trained[number].end + BETWEEN_S, tokens)
        for number, (_, end, _, tokens) in enumerate(ran.steps, 1)
    ]
    waits = {number: it.start - it.asked + trained[number].start - trained[number].asked for number, it in rollouts.items()}
    return Ran(steps, stays, waits)


def _line(it: Held, token: int) -> str:
    about = {"job": it.job, "phase": it.phase, "nodes": NODES[it.phase], "token": token}
    when = (EPOCH + timedelta(seconds=it.end)).isoformat(timespec="microseconds")
    line = {"timestamp": when, "event": "lease_held", "duration_sec": it.end - it.start, "extra": about}
    return json.dumps(line | {"workid": 0, "step": it.step, "role": "coordinator", "job": "coordinator"})
