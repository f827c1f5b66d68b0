"""`verl-mux top`: a state as rows, tables, JSON and Prometheus gauges, and the keys of its terminal. Called by top_command.py."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from verl_mux.profiling.live.state import IN_REWARD, IN_TOOL_OR_REWARD, PARKED, STATES, Job, Replica, State

# Column -> what its rows are sorted by.
JOB_COLUMNS = {
    "job": "job",
    "step": "step",
    "runs": "runs",
    "on": "on",
    "for": "for_s",
    "waits for": "waited_s",
    "behind": "behind",
    "requests": "requests",
    "reward": "reward",
    "step took": "step_sec",
}
REPLICA_COLUMNS = {
    "job": "job",
    "replica": "replica",
    "node": "node",
    "step": "step",
    "running": "running",
    "queued": "queued",
    "tool/reward": "tool_or_reward",
    "parked": "parked",
    "KV use": "token_usage",
    "tokens/s": "tokens_per_sec",
    "done": "done",
    "tokens": "tokens",
    "retracted": "retracted",
    "age": "age_s",
}
_NOTHING: tuple[Any, ...] = (None, [], {})
STALE_S = 5.0  # counters come once a second while an engine works


@dataclass
class Order:
    """Of a table's rows. column: which, counted from 0. only: a text that a row must hold."""

    column: int = 0
    falling: bool = False
    only: str = ""


@dataclass
class Choice:
    """What the reader has chosen. on_jobs: keys sort and filter the jobs' table, not the replicas'."""

    replicas: Order = field(default_factory=Order)
    jobs: Order = field(default_factory=Order)
    on_jobs: bool = False
    paused: bool = False

    @property
    def order(self) -> Order:
        return self.jobs if self.on_jobs else self.replicas

    @property
    def columns(self) -> Mapping[str, str]:
        return JOB_COLUMNS if self.on_jobs else REPLICA_COLUMNS


def jobs(state: State, order: Order) -> list[dict[str, Any]]:
    """A row a job, those that `order` leaves; seconds are at the state's newest line."""
    rows = [_job_row(state, job) for _, job in sorted(state.jobs.items())]
    return _ordered(rows, order, JOB_COLUMNS, ("job", "runs", "on", "waits_for", "behind"))


def _job_row(state: State, job: Job) -> dict[str, Any]:
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
        "requests": _by_state(job.requests.count()),
        **{key: job.figures.get(key) for key in ("reward", "step_sec")},
    }


def replicas(state: State, order: Order) -> list[dict[str, Any]]:
    """A row a replica, those that `order` leaves. running, queued: by the engine's own counters; requests: those that were last
    seen on it, by state."""
    rows = [_replica_row(state, it) for _, it in sorted(state.replicas.items())]
    return _ordered(rows, order, REPLICA_COLUMNS, ("job", "replica", "node"))


def _replica_row(state: State, it: Replica) -> dict[str, Any]:
    told = {key: it.counters.get(key) for key in ("running", "queued", "token_usage", "tokens_per_sec")}
    done = {"done": it.done, "tokens": it.tokens, "retracted": it.retracted}
    seen = state.jobs[it.job].requests.count(it.number) if it.job in state.jobs else Counter()
    counted = {"tool_or_reward": seen[IN_TOOL_OR_REWARD] + seen[IN_REWARD], "parked": seen[PARKED], "requests": _by_state(seen)}
    age = round(state.now - it.at, 3) if it.at else None
    return {"job": it.job, "replica": it.number, "node": it.node, "step": it.step, **told, **counted, **done, "age_s": age}


def _by_state(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for name in STATES if counts[name]}


def _ordered(
    rows: list[dict[str, Any]], order: Order, columns: Mapping[str, str], filtered_by: Sequence[str]
) -> list[dict[str, Any]]:
    """What has no value in the column comes last, either way round."""
    key = list(columns.values())[order.column]
    rows = [row for row in rows if order.only in " ".join(_words(row[name]) for name in filtered_by)]
    known = [row for row in rows if row[key] not in _NOTHING]
    known.sort(key=lambda row: _rank(row[key]), reverse=order.falling)
    return known + [row for row in rows if row[key] in _NOTHING]


def _words(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else "" if value is None else str(value)


def _rank(value: Any) -> Any:
    """Requests by how many there are."""
    return sum(value.values()) if isinstance(value, dict) else value


def as_json(state: State, choice: Choice) -> dict[str, Any]:
    return {"now": state.now, "jobs": jobs(state, choice.jobs), "replicas": replicas(state, choice.replicas)}


def render(state: State, choice: Choice, name: str) -> Group:
    head = Text(f"{name}: {len(state.jobs)} jobs, {len(state.replicas)} replicas", style="bold")
    for table, order in (("jobs", choice.jobs), ("replicas", choice.replicas)):
        if order.only:
            head.append(f"   only {table} with {order.only!r}")
    if choice.paused:
        head.append("   paused", style="yellow")
    foot = Text(
        f"keys are for {'jobs' if choice.on_jobs else 'replicas'}, Tab: for the other table   s sort   r the other way   "
        "/ only rows with   p pause   q quit",
        style="dim",
    )
    tables = _jobs_table(jobs(state, choice.jobs), choice), _replicas_table(replicas(state, choice.replicas), choice)
    return Group(head, *tables, foot)


def _empty(columns: Mapping[str, str], order: Order, chosen: bool, left: Collection[str]) -> Table:
    """Its columns, with a mark at the one that it is sorted by; `left`: those that are set flush left."""
    table = Table(box=None, padding=(0, 1), header_style="bold cyan" if chosen else "cyan")
    for place, column in enumerate(columns):
        mark = (" v" if order.falling else " ^") if place == order.column else ""
        table.add_column(column + mark, justify="left" if column in left else "right")
    return table


def _jobs_table(rows: Sequence[dict[str, Any]], choice: Choice) -> Table:
    table = _empty(JOB_COLUMNS, choice.jobs, choice.on_jobs, JOB_COLUMNS)
    for row in rows:
        waits = f"{row['waits_for']}, {row['waited_s']:.0f} s" if row["waits_for"] else "-"
        requests = ", ".join(f"{count} {state}" for state, count in row["requests"].items())
        held = f"{row['for_s']:.0f} s" if row["runs"] else "-"
        reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
        took = "-" if row["step_sec"] is None else f"{row['step_sec']:.1f} s"
        # A part is logged when it ends.
        runs = f"{row['runs']} (after {row['doing']})" if row["runs"] else "ended" if row["ended"] else "-"
        cells = [row["job"], str(row["step"]), runs, ", ".join(row["on"]) or "-", held, waits]
        table.add_row(*cells, ", ".join(row["behind"]) or "-", requests or "-", reward, took)
    return table


def _replicas_table(rows: Sequence[dict[str, Any]], choice: Choice) -> Table:
    table = _empty(REPLICA_COLUMNS, choice.replicas, not choice.on_jobs, ("job", "node"))
    for row in rows:
        stale = row["age_s"] is None or row["age_s"] > STALE_S
        usage = "-" if row["token_usage"] is None else f"{row['token_usage']:.0%}"
        outside = [str(row["tool_or_reward"]), str(row["parked"])]
        counters = [_whole(row["running"]), _whole(row["queued"]), *outside, usage, _whole(row["tokens_per_sec"])]
        done = [str(row[key]) for key in ("done", "tokens", "retracted")]
        age = "-" if row["age_s"] is None else f"{row['age_s']:.0f} s"
        cells = [row["job"], str(row["replica"]), row["node"], str(row["step"]), *counters, *done, age]
        table.add_row(*cells, style="dim" if stale else "")
    return table


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


Sample = tuple[str, Mapping[str, str], float | None]  # metric, labels, value
# Counters come once a second while an engine works, and those of one that sleeps are no news. Files of other hosts may show late.
QUIET_S = 15.0

# metric -> (type, help)
METRICS = {
    "mux_top_quiet_seconds": ("gauge", "Since the newest line of the run's logs, by the clock of who reads them."),
    "mux_top_job_ended": ("gauge", "1 when the job has ended, 0 until then."),
    "mux_top_job_step": ("gauge", "The step that the job is at."),
    "mux_top_job_step_seconds": ("gauge", "How long the job's last whole step took."),
    "mux_top_job_reward": ("gauge", "Mean reward of the job's last whole step."),
    "mux_top_job_requests": ("gauge", "Requests of the job's step, by state."),
    "mux_top_lease_held_seconds": ("gauge", "How long a job has held its lease on the node."),
    "mux_top_lease_waited_seconds": ("gauge", "How long a job has waited for a lease on the node."),
    "mux_top_replica_running": ("gauge", "Requests that run in the engine."),
    "mux_top_replica_queued": ("gauge", "Requests in the engine's queue."),
    "mux_top_replica_kv_usage": ("gauge", "Part of the engine's KV cache that is in use, 0 to 1."),
    "mux_top_replica_tokens_per_second": ("gauge", "Tokens that the engine writes a second."),
    "mux_top_replica_step": ("gauge", "The step that the engine generates for."),
    "mux_top_replica_stays_done": ("gauge", "Stays of that step that ended in the engine and were not cut off."),
    "mux_top_replica_tokens": ("gauge", "Tokens of that step's stays that ended in the engine."),
    "mux_top_replica_retracted": ("gauge", "Requests of that step that the engine threw out for want of KV cache."),
}
_COUNTERS = {
    "running": "mux_top_replica_running",
    "queued": "mux_top_replica_queued",
    "token_usage": "mux_top_replica_kv_usage",
    "tokens_per_sec": "mux_top_replica_tokens_per_second",
}


def samples(state: State, now: float) -> Iterator[Sample]:
    """Of METRICS. now: seconds since the epoch; the time of the newest line where that is later.

    Of jobs that have ended only that and their last step; of engines whose counters are older than QUIET_S, no counters.
    """
    now = max(now, state.now)
    if state.jobs or state.replicas:
        yield "mux_top_quiet_seconds", {}, now - state.now
    yield from itertools.chain.from_iterable(_job_samples(job, now) for _, job in sorted(state.jobs.items()))
    for (name, _), replica in sorted(state.replicas.items()):
        if name not in state.jobs or not state.jobs[name].ended:
            yield from _replica_samples(replica, now)


def _job_samples(job: Job, now: float) -> Iterator[Sample]:
    whose = {"job": job.name}
    yield "mux_top_job_ended", whose, int(job.ended)
    yield "mux_top_job_step", whose, job.step
    yield "mux_top_job_step_seconds", whose, job.figures.get("step_sec")
    yield "mux_top_job_reward", whose, job.figures.get("reward")
    if job.ended:
        return
    requests = job.requests.count()
    for state in STATES:
        yield "mux_top_job_requests", {**whose, "state": state}, requests[state]
    if job.phase:
        for node in job.nodes:
            yield "mux_top_lease_held_seconds", {"node": node, **whose, "phase": job.phase}, now - job.since
    if job.asks:
        for node in job.nodes_of.get(job.asks) or ("",):
            yield "mux_top_lease_waited_seconds", {"node": node, **whose, "phase": job.asks}, now - job.asked


def _replica_samples(replica: Replica, now: float) -> Iterator[Sample]:
    where = {"job": replica.job, "replica": str(replica.number), "node": replica.node}
    if now - replica.at <= QUIET_S:
        for counter, metric in _COUNTERS.items():
            yield metric, where, replica.counters.get(counter)
    yield "mux_top_replica_step", where, replica.step
    yield "mux_top_replica_stays_done", where, replica.done
    yield "mux_top_replica_tokens", where, replica.tokens
    yield "mux_top_replica_retracted", where, replica.retracted


def watch(look: Callable[[], None], shown: Callable[[], RenderableType], choice: Choice, every: float) -> None:
    """Until q or Ctrl-C: looks `every` so many seconds unless it pauses, and shows."""
    with _keys_at_once(), Live(auto_refresh=False, screen=True) as live, contextlib.suppress(KeyboardInterrupt):
        keys = Keys(choice)
        while not keys.ended:
            live.update(shown(), refresh=True)
            for key in _typed(every):
                keys.press(key)
            if not choice.paused and not keys.ended:
                look()


class Keys:
    """What each key does to the reader's choice; a text to filter by goes on until Enter."""

    def __init__(self, choice: Choice) -> None:
        self.ended = False
        self._choice = choice
        self._asking = False

    def press(self, key: str) -> None:
        order = self._choice.order
        if self._asking:
            if key in "\r\n\x1b":
                self._asking = False
            else:
                order.only = order.only[:-1] if key in "\x7f\x08" else order.only + key
        elif key == "/":
            self._asking, order.only = True, ""
        elif key == "s":
            order.column = (order.column + 1) % len(self._choice.columns)
        elif key == "r":
            order.falling = not order.falling
        elif key == "\t":
            self._choice.on_jobs = not self._choice.on_jobs
        elif key == "p":
            self._choice.paused = not self._choice.paused
        elif key == "q":
            self.ended = True


def _typed(seconds: float) -> str:
    """Keys typed within `seconds`; at once when there are any. Without a terminal to type in, none."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys come without Enter and are not shown."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
