"""What a terminal shows while `verl-mux run` works: each node's last minute, and the tables of the coordinator's status.

Runs in the launcher; called by watch.py; pure rendering.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.text import Text

from verl_mux.coordinator import status_view

_COLOURS = ("cyan", "yellow", "green", "magenta", "red", "blue")
_LANE_CELLS = 60


class LiveView:
    """Keeps the last minute of each node's lane: `update` takes the coordinator's snapshot, `render` draws."""

    def __init__(self, jobs: list[str]) -> None:
        self._colour = {job: _COLOURS[i % len(_COLOURS)] for i, job in enumerate(jobs)}
        self._lanes: dict[str, deque[str | None]] = {}
        self._snapshot: dict[str, Any] = {}
        self._last_lines: dict[str, str] = {}

    def update(self, snapshot: dict[str, Any]) -> None:
        """Add one cell to every lane."""
        self._snapshot = snapshot
        for node, state in _nodes(snapshot):
            lane = self._lanes.setdefault(node, deque([None] * _LANE_CELLS, maxlen=_LANE_CELLS))
            lane.append(state["holders"][0]["job"] if state["holders"] else None)

    def render(self, elapsed_s: float, rss_bytes: int) -> Group:
        mode = "" if self._snapshot else "   starting"
        head = Text(f"{elapsed_s:6.0f} s{mode}   host memory {rss_bytes / 2**30:.1f} GiB", style="bold")
        lanes = (Text.assemble(f"{node:12} ", *map(self._cell, lane)) for node, lane in self._lanes.items())
        return Group(head, *lanes, *([status_view.tables(self._snapshot)] if self._snapshot else []))

    def _cell(self, job: str | None) -> tuple[str, str]:
        return ("█", self._colour.get(job, "dim")) if job else ("·", "dim")

    def plain_lines(self, elapsed_s: float) -> Iterator[str]:
        """One line for every job whose step or reward changed since the last call."""
        for name, job in self._snapshot.get("jobs", {}).items():
            if job["state"] != "live" and job["steps_done"] == 0:
                continue  # it has only asked whether it may come
            reward = (job.get("metrics") or {}).get("reward")
            held = ((node, h["phase"]) for node, state in _nodes(self._snapshot) for h in state["holders"] if h["job"] == name)
            phase = next((f"{phase} on {node}" for node, phase in held), None)
            doing = phase or (f"waits for {', '.join(job['waiting'])}" if job["waiting"] else job["note"] or job["state"])
            line = f"{name}: step {job['steps_done']}" + (f", reward {reward:.3f}" if reward is not None else "")
            if line != self._last_lines.get(name):
                self._last_lines[name] = line
                yield f"[{elapsed_s:6.1f} s] {line} ({doing})"


def _nodes(snapshot: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for pool in snapshot.get("pools", {}).values():
        yield from pool["nodes"].items()
