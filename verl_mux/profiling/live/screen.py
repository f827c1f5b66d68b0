"""`verl-mux top`: a state as rows, tables and JSON, and the keys of its terminal. Runs on the command line; called by
top_command.py; reads the keyboard."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from verl_mux.profiling.live.job_states import COUNTERS, IN_REWARD, IN_TOOL_OR_REWARD, PARKED, Job, Replica, State

Row = dict[str, Any]
Cells = Mapping[str, Callable[[Row], str]]  # name of a column -> its cell in a row


def _shown(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else form.format(row[key])


def _runs(row: Row) -> str:
    # A part of a phase is logged when it ends.
    return f"{row['runs']} (after {row['doing']})" if row["runs"] else "ended" if row["ended"] else "-"


JOB_COLUMNS: Cells = {
    "job": lambda row: row["job"],
    "step": _shown("step", "{}"),
    "runs": _runs,
    "on": lambda row: ", ".join(row["on"]) or "-",
    "for": _shown("for_s", "{:.0f} s"),
    "waits for": lambda row: f"{row['waits_for']}, {row['waited_s']:.0f} s" if row["waits_for"] else "-",
    "behind": lambda row: ", ".join(row["behind"]) or "-",
    "requests": lambda row: ", ".join(f"{n} {state}" for state, n in row["requests"].items()) or "-",
    "reward": _shown("reward", "{:.3f}"),
    "step took": _shown("step_sec", "{:.1f} s"),
}
# Name of a column -> the key of a row that sorts by it, and its cell.
REPLICA_COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
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
STALE_S = 5.0  # counters come once a second while an engine works
QUIET_S = 120.0  # clocks of hosts may differ by less


@dataclass
class Choice:
    """What the reader has chosen for the replicas' table. column: the index of the one that sorts. only: a text that a row must
    hold."""

    column: int = 0
    falling: bool = False
    only: str = ""
    paused: bool = False


def _jobs(state: State) -> list[Row]:
    """A row a job; seconds are at the state's newest line."""
    return [_job_row(state, job) for _, job in sorted(state.jobs.items())]


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


def _replicas(state: State, choice: Choice) -> list[Row]:
    """A row a replica that is chosen; those without a value in the column that sorts come last. running, queued: the engine's
    counters; requests: those last seen on it, by state."""
    key = list(REPLICA_COLUMNS.values())[choice.column][0]
    rows = [_replica_row(state, replica) for _, replica in sorted(state.replicas.items())]
    rows = [row for row in rows if choice.only in f"{row['job']} {row['replica']} {row['node']}"]
    known = sorted((row for row in rows if row[key] is not None), key=lambda row: row[key], reverse=choice.falling)
    return known + [row for row in rows if row[key] is None]


def _replica_row(state: State, replica: Replica) -> Row:
    job = state.jobs.get(replica.job)
    seen = job.requests.count(replica.number) if job else {}
    goes_on = job is None or not job.ended  # what an engine last counted is no more when its job has ended
    in_tool = seen.get(IN_TOOL_OR_REWARD, 0) + seen.get(IN_REWARD, 0)
    return {
        **{"job": replica.job, "replica": replica.number, "node": replica.node, "step": replica.step},
        **{key: replica.counters.get(key) if goes_on else None for key in COUNTERS},
        **{"tool_or_reward": in_tool, "parked": seen.get(PARKED, 0), "requests": seen},
        **{"done": replica.done, "tokens": replica.tokens, "retracted": replica.retracted},
        "age_s": round(state.now - replica.at, 3) if replica.at and goes_on else None,
    }


def as_json(state: State, choice: Choice) -> dict[str, Any]:
    return {"now": state.now, "jobs": _jobs(state), "replicas": _replicas(state, choice)}


def render(state: State, choice: Choice) -> Group:
    head = Text(f"{state.directory.resolve().name}: {len(state.jobs)} jobs, {len(state.replicas)} replicas", style="bold")
    head.append(f"   only replicas with {choice.only!r}" if choice.only else "")
    if state.now and (silent_s := time.time() - state.now) > QUIET_S and not all(job.ended for job in state.jobs.values()):
        head.append(f"   the newest line is {silent_s / 60:.0f} min old: ages count from it", style="yellow")
    head.append("   paused" if choice.paused else "", style="yellow")
    mark = list(REPLICA_COLUMNS)[choice.column]
    cells = {name + (" v" if choice.falling else " ^") * (name == mark): cell for name, (_, cell) in REPLICA_COLUMNS.items()}
    replicas = _table(_replicas(state, choice), cells, ("job", "node"))
    keys = Text("s sort replicas   r the other way   / only rows with   p pause   q quit", style="dim")
    return Group(head, _table(_jobs(state), JOB_COLUMNS, tuple(JOB_COLUMNS)), replicas, keys)


def _table(rows: list[Row], cells: Cells, left: tuple[str, ...]) -> Table:
    """Columns whose names begin with one of `left` are flush left; rows whose counters are stale are dim."""
    table = Table(box=None, padding=(0, 1), header_style="bold cyan")
    for name in cells:
        table.add_column(name, justify="left" if name.startswith(left) else "right")
    for row in rows:
        age = row.get("age_s", 0.0)
        table.add_row(*(cell(row) for cell in cells.values()), style="dim" if age is None or age > STALE_S else "")
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
        choice = self._choice
        if self._asking:
            if key in "\r\n\x1b":
                self._asking = False
            else:
                choice.only = choice.only[:-1] if key in "\x7f\x08" else choice.only + key
        elif key == "/":
            self._asking, choice.only = True, ""
        elif key == "s":
            choice.column = (choice.column + 1) % len(REPLICA_COLUMNS)
        elif key == "r":
            choice.falling = not choice.falling
        elif key == "p":
            choice.paused = not choice.paused
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
