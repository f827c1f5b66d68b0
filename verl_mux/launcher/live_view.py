"""What a person sees while jobs run: the pools' lanes, who holds and who waits, steps, reward, memory. Pure rendering."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

_COLOURS = ("cyan", "yellow", "green", "magenta", "red", "blue")
_LANE_CELLS = 60


class LiveView:
    """Keeps the last minute of each node's lane; `update` takes the coordinator's snapshot, `render` draws."""

    def __init__(self, jobs: list[str]) -> None:
        self._colour = {job: _COLOURS[i % len(_COLOURS)] for i, job in enumerate(jobs)}
        self._lanes: dict[str, deque[str | None]] = {}
        self._snapshot: dict = {}
        self._last_lines: dict[str, str] = {}

    def update(self, snapshot: dict) -> None:
        """Add one cell to every lane."""
        self._snapshot = snapshot
        for node, state in _nodes(snapshot):
            lane = self._lanes.setdefault(node, deque([None] * _LANE_CELLS, maxlen=_LANE_CELLS))
            holders = state["holders"]
            lane.append(holders[0]["job"] if holders else None)

    def render(self, elapsed_s: float, rss_bytes: int) -> Group:
        mode = self._snapshot.get("segment", {}).get("mode", "starting")
        head = Text(f"{elapsed_s:6.0f} s   {mode}   host memory {rss_bytes / 2**30:.1f} GiB", style="bold")
        return Group(head, self._node_table(), self._job_table())

    def plain_lines(self, elapsed_s: float) -> Iterator[str]:
        """One line for every job whose step or reward changed since the last call."""
        for name, job in self._snapshot.get("jobs", {}).items():
            if job["state"] != "live" and job["steps_done"] == 0:
                continue  # it has only asked so far whether it may come
            reward = (job.get("metrics") or {}).get("reward")
            phase = next(
                (f"{h['phase']} on {node}" for node, s in _nodes(self._snapshot) for h in s["holders"] if h["job"] == name), None
            )
            doing = phase or (f"waits for {', '.join(job['waiting'])}" if job["waiting"] else job["note"] or job["state"])
            line = f"{name}: step {job['steps_done']}" + (f", reward {reward:.3f}" if reward is not None else "")
            if line != self._last_lines.get(name):
                self._last_lines[name] = line
                yield f"[{elapsed_s:6.1f} s] {line} ({doing})"

    def _node_table(self) -> Table:
        table = Table(box=None, padding=(0, 1))
        for column in ("node", "last minute", "runs", "waits", "device memory"):
            table.add_column(column)
        for node, state in _nodes(self._snapshot):
            runs = ", ".join(f"{h['job']} {h['phase']} {h['held_s']:.0f} s ({h['note'] or '-'})" for h in state["holders"])
            waits = ", ".join(f"{q['job']} {q['waited_s']:.0f} s" for q in state["queue"])
            memory = f"{state['bytes'] / 2**20:.0f} MiB (peak {state['peak_bytes'] / 2**20:.0f})"
            table.add_row(node, self._lane(node), runs or "-", waits or "-", memory)
        return table

    def _lane(self, node: str) -> Text:
        lane = Text()
        for job in self._lanes.get(node, ()):
            lane.append("█" if job else "·", style=self._colour.get(job, "dim") if job else "dim")
        return lane

    def _job_table(self) -> Table:
        table = Table(box=None, padding=(0, 1))
        for column in ("job", "step", "reward", "response", "now"):
            table.add_column(column)
        for name, job in self._snapshot.get("jobs", {}).items():
            metrics = job.get("metrics") or {}
            step = f"{job['steps_done']}/{job['steps'] or '?'}"
            now = job["note"] or job["state"]
            if job["progress"]:
                now += f" {job['progress'][0]}/{job['progress'][1]} samples"
            row = (
                step,
                f"{metrics.get('reward', float('nan')):.3f}",
                f"{metrics.get('response_length', float('nan')):.0f} tokens",
                now,
            )
            table.add_row(Text(name, style=self._colour.get(name, "")), *row)
        return table


def _nodes(snapshot: dict) -> Iterator[tuple[str, dict]]:
    for pool in snapshot.get("pools", {}).values():
        yield from pool["nodes"].items()
