"""`verl-mux top`: a state as rows, tables and JSON, and the keys of its terminal. Runs on the command line; called by
top_command.py; reads the keyboard."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from verl_mux.profiling.live.job_states import COUNTERS, IN_REWARD, IN_TOOL_OR_REWARD, PARKED, Job, Replica, State

Row = dict[str, Any]
Columns = Mapping[str, tuple[str, Callable[[Row], str]]]  # name -> (the key that sorts by it, its cell in a row)


def _shown(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else form.format(row[key])


def _runs(row: Row) -> str:
    # A part of a phase is logged when it ends.
    return f"{row['runs']} (after {row['doing']})" if row["runs"] else "ended" if row["ended"] else "-"


JOB_COLUMNS: Columns = {
    "job": ("job", lambda row: row["job"]),
    "step": ("step", _shown("step", "{}")),
    "runs": ("runs", _runs),
    "on": ("on", lambda row: ", ".join(row["on"]) or "-"),
    "for": ("for_s", _shown("for_s", "{:.0f} s")),
    "waits for": ("waited_s", lambda row: f"{row['waits_for']}, {row['waited_s']:.0f} s" if row["waits_for"] else "-"),
    "behind": ("behind", lambda row: ", ".join(row["behind"]) or "-"),
    "requests": ("requests", lambda row: ", ".join(f"{n} {state}" for state, n in row["requests"].items()) or "-"),
    "reward": ("reward", _shown("reward", "{:.3f}")),
    "step took": ("step_sec", _shown("step_sec", "{:.1f} s")),
}
REPLICA_COLUMNS: Columns = {
    "job": ("job", lambda row: row["job"]),
    "replica": ("replica", _shown("replica", "{}")),
    "node": ("node", lambda row: row["node"]),
    "step": ("step", _shown("step", "{}")),
    "running": ("running", _shown("running", "{:.0f}")),
    "queued": ("queued", _shown("queued", "{:.0f}")),
    "tool/reward": ("tool_or_reward", _shown("tool_or_reward", "{}")),
    "parked": ("parked", _shown("parked", "{}")),
    "KV use": ("token_usage", _shown("token_usage", "{:.0%}")),
    "tokens/s": ("tokens_per_sec", _shown("tokens_per_sec", "{:.0f}")),
    "done": ("done", _shown("done", "{}")),
    "tokens": ("tokens", _shown("tokens", "{}")),
    "retracted": ("retracted", _shown("retracted", "{}")),
    "age": ("age_s", _shown("age_s", "{:.0f} s")),
}
_EMPTY: tuple[Any, ...] = (None, [], {})
STALE_S = 5.0  # counters come once a second while an engine works


@dataclass
class Order:
    """Order of a table's rows. column: its index. only: a text that a row must hold."""

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
    def columns(self) -> Columns:
        return JOB_COLUMNS if self.on_jobs else REPLICA_COLUMNS


def _jobs(state: State, order: Order) -> list[Row]:
    """A row a job that `order` leaves; seconds are at the state's newest line."""
    rows = [_job_row(state, job) for _, job in sorted(state.jobs.items())]
    return _ordered(rows, order, JOB_COLUMNS, ("job", "runs", "on", "waits_for", "behind"))


def _job_row(state: State, job: Job) -> Row:
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
        "requests": job.requests.count(),
        **{key: job.figures.get(key) for key in ("reward", "step_sec")},
    }


def _replicas(state: State, order: Order) -> list[Row]:
    """A row a replica that `order` leaves. running, queued: the engine's counters; requests: those last seen on it, by state."""
    rows = [_replica_row(state, replica) for _, replica in sorted(state.replicas.items())]
    return _ordered(rows, order, REPLICA_COLUMNS, ("job", "replica", "node"))


def _replica_row(state: State, replica: Replica) -> Row:
    seen = state.jobs[replica.job].requests.count(replica.number) if replica.job in state.jobs else {}
    in_tool = seen.get(IN_TOOL_OR_REWARD, 0) + seen.get(IN_REWARD, 0)
    return {
        **{"job": replica.job, "replica": replica.number, "node": replica.node, "step": replica.step},
        **{key: replica.counters.get(key) for key in COUNTERS},
        **{"tool_or_reward": in_tool, "parked": seen.get(PARKED, 0), "requests": seen},
        **{"done": replica.done, "tokens": replica.tokens, "retracted": replica.retracted},
        "age_s": round(state.now - replica.at, 3) if replica.at else None,
    }


def _ordered(rows: list[Row], order: Order, columns: Columns, filtered_by: Sequence[str]) -> list[Row]:
    """Rows without a value in the column come last, either way round; requests count by their number."""
    key = list(columns.values())[order.column][0]
    rows = [row for row in rows if order.only in " ".join(_text(row[name]) for name in filtered_by)]
    known = [row for row in rows if row[key] not in _EMPTY]
    known.sort(key=lambda row: sum(row[key].values()) if isinstance(row[key], dict) else row[key], reverse=order.falling)
    return known + [row for row in rows if row[key] in _EMPTY]


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else "" if value is None else str(value)


def as_json(state: State, choice: Choice) -> dict[str, Any]:
    return {"now": state.now, "jobs": _jobs(state, choice.jobs), "replicas": _replicas(state, choice.replicas)}


def render(state: State, choice: Choice) -> Group:
    head = Text(f"{state.directory.resolve().name}: {len(state.jobs)} jobs, {len(state.replicas)} replicas", style="bold")
    for table, order in (("jobs", choice.jobs), ("replicas", choice.replicas)):
        if order.only:
            head.append(f"   only {table} with {order.only!r}")
    if choice.paused:
        head.append("   paused", style="yellow")
    whose = "jobs" if choice.on_jobs else "replicas"
    keys = "Tab: for the other table   s sort   r the other way   / only rows with   p pause   q quit"
    jobs = _table(_jobs(state, choice.jobs), JOB_COLUMNS, choice.jobs, choice.on_jobs, JOB_COLUMNS)
    replicas = _table(
        _replicas(state, choice.replicas), REPLICA_COLUMNS, choice.replicas, not choice.on_jobs, {"job": 0, "node": 0}
    )
    return Group(head, jobs, replicas, Text(f"keys are for {whose}, {keys}", style="dim"))


def _table(rows: list[Row], columns: Columns, order: Order, chosen: bool, left: Mapping[str, Any]) -> Table:
    """Mark the column that sorts; set the columns of `left` flush left; dim rows whose counters are stale."""
    table = Table(box=None, padding=(0, 1), header_style="bold cyan" if chosen else "cyan")
    for place, column in enumerate(columns):
        mark = (" v" if order.falling else " ^") if place == order.column else ""
        table.add_column(column + mark, justify="left" if column in left else "right")
    for row in rows:
        age = row.get("age_s", 0.0)
        table.add_row(*(cell(row) for _, cell in columns.values()), style="dim" if age is None or age > STALE_S else "")
    return table


def watch(look: Callable[[], None], shown: Callable[[], RenderableType], choice: Choice, every: float) -> None:
    """Look every `every` seconds unless paused, and show, until q or Ctrl-C."""
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
    """Keys typed within `seconds`, returned at once; none without a terminal to type in."""
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
