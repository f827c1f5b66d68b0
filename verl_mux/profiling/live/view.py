"""A state as rows, as tables for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from verl_mux.profiling.live.state import Job, Replica, State

STATES = ("running", "between turns", "scored", "parked", "given up", "done")
JOB_COLUMNS = ("job", "step", "runs", "on", "for", "waits for", "behind", "requests", "reward", "step took")
REPLICA_COLUMNS = (
    "job",
    "replica",
    "node",
    "step",
    "running",
    "queued",
    "KV use",
    "tokens/s",
    "done",
    "tokens",
    "retracted",
    "age",
)
STALE_S = 5.0  # counters come once a second while an engine works


@dataclass
class Choice:
    """What the reader has chosen. sort: column of the replicas' table. only: of these, a text that a row must hold."""

    sort: int = 0
    falling: bool = False
    only: str = ""
    paused: bool = False


def jobs(state: State) -> list[dict[str, Any]]:
    """A row a job; seconds are at the state's newest line."""
    return [_job(state, job) for _, job in sorted(state.jobs.items())]


def _job(state: State, job: Job) -> dict[str, Any]:
    return {
        "job": job.name,
        "step": job.step,
        "ended": job.ended,
        "runs": job.phase,
        "doing": job.doing,
        "on": list(job.nodes),
        "for_s": round(state.now - job.since, 3) if job.phase else None,
        "waits_for": job.asks,
        "waited_s": round(state.now - job.asked, 3) if job.asks else None,
        "behind": state.waits_behind(job),
        "requests": {name: job.states[name] for name in STATES if job.states[name]},
        **{key: job.figures.get(key) for key in ("reward", "step_sec")},
    }


def replicas(state: State, choice: Choice) -> list[dict[str, Any]]:
    """A row a replica, those that `choice` leaves, in its order."""
    rows = [_replica(state, it) for _, it in sorted(state.replicas.items())]
    rows = [row for row in rows if choice.only in " ".join(map(str, (row["job"], row["replica"], row["node"])))]
    key = list(rows[0])[choice.sort] if rows else ""
    known = sorted((row for row in rows if row[key] is not None), key=lambda row: row[key], reverse=choice.falling)
    return known + [row for row in rows if row[key] is None]


def _replica(state: State, it: Replica) -> dict[str, Any]:
    told = {key: it.counters.get(key) for key in ("running", "queued", "token_usage", "tokens_per_sec")}
    done = {"done": it.done, "tokens": it.tokens, "retracted": it.retracted}
    age = round(state.now - it.at, 3) if it.at else None
    return {"job": it.job, "replica": it.number, "node": it.node, "step": it.step, **told, **done, "age_s": age}


def as_json(state: State, choice: Choice) -> dict[str, Any]:
    return {"now": state.now, "jobs": jobs(state), "replicas": replicas(state, choice)}


def render(state: State, choice: Choice, name: str) -> Group:
    head = Text(f"{name}: {len(state.jobs)} jobs, {len(state.replicas)} replicas", style="bold")
    if choice.only:
        head.append(f"   only {choice.only!r}")
    if choice.paused:
        head.append("   paused", style="yellow")
    foot = Text("s sort   r the other way   / only rows with   p pause   q quit", style="dim")
    return Group(head, _jobs_table(jobs(state)), _replicas_table(replicas(state, choice), choice), foot)


def _jobs_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(*JOB_COLUMNS, box=None, padding=(0, 1), header_style="bold cyan")
    for row in rows:
        waits = f"{row['waits_for']}, {row['waited_s']:.0f} s" if row["waits_for"] else "-"
        requests = ", ".join(f"{count} {state}" for state, count in row["requests"].items())
        held = f"{row['for_s']:.0f} s" if row["runs"] else "-"
        reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
        took = "-" if row["step_sec"] is None else f"{row['step_sec']:.1f} s"
        runs = f"{row['runs']} ({row['doing']})" if row["runs"] else "ended" if row["ended"] else "-"
        cells = [row["job"], str(row["step"]), runs, ", ".join(row["on"]) or "-", held, waits]
        table.add_row(*cells, ", ".join(row["behind"]) or "-", requests or "-", reward, took)
    return table


def _replicas_table(rows: Sequence[dict[str, Any]], choice: Choice) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold cyan")
    for place, column in enumerate(REPLICA_COLUMNS):
        mark = (" v" if choice.falling else " ^") if place == choice.sort else ""
        table.add_column(column + mark, justify="left" if place in (0, 2) else "right")
    for row in rows:
        stale = row["age_s"] is None or row["age_s"] > STALE_S
        usage = "-" if row["token_usage"] is None else f"{row['token_usage']:.0%}"
        counters = [_whole(row["running"]), _whole(row["queued"]), usage, _whole(row["tokens_per_sec"])]
        done = [str(row[key]) for key in ("done", "tokens", "retracted")]
        age = "-" if row["age_s"] is None else f"{row['age_s']:.0f} s"
        cells = [row["job"], str(row["replica"]), row["node"], str(row["step"]), *counters, *done, age]
        table.add_row(*cells, style="dim" if stale else "")
    return table


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
