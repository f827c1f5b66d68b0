"""In which state each request of a job's newest step is, and on which replica, as far as its events tell; pure.

A request is queued from asking for an engine until the engine's scheduler lets it in, then runs until its stay ends. What it does
next is logged when it is over: a tool or the reward, or, with segments, nothing until its next round. Where no scheduler logs
(`engine_queue`), nobody is seen to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Line

QUEUED, RUNNING, IN_REWARD, PARKED, GIVEN_UP = "queued", "running", "in reward", "parked", "given up"
IN_TOOL_OR_REWARD, SCORED, DONE = "in tool or reward", "scored", "done"
STATES = (RUNNING, QUEUED, IN_TOOL_OR_REWARD, IN_REWARD, SCORED, PARKED, GIVEN_UP, DONE)

_AFTER = {
    events.REQUEST_START: QUEUED,
    events.REQUEST_REQUEUED: QUEUED,
    events.REQUEST_PARKED: QUEUED,
    events.REQUEST_MIGRATED: QUEUED,
    events.TURN_PREPROCESS: QUEUED,
    events.TOOL_EXECUTION: QUEUED,
    events.ENGINE_QUEUE: RUNNING,
    events.REWARD: SCORED,
    events.REQUEST_COMPLETE: DONE,
    events.REQUEST_PADDED: GIVEN_UP,
}


@dataclass
class Request:
    """at: the end of the line that said so, seconds since the epoch. replica: the last one that it was seen on."""

    state: str
    at: float
    replica: int | None = None


class Requests:
    """feed(line) of the newest step, from agent loops and engines in any order -> states."""

    def __init__(self) -> None:
        self._known: dict[str, Request] = {}
        self._validating: set[str] = set()
        self._has_tools: bool | None = None  # None: until a request is over

    def next_step(self) -> None:
        """What was cut off goes on; all the rest of the step before is over."""
        self._known = {name: request for name, request in self._known.items() if request.state == PARKED}
        self._validating = set()

    def feed(self, line: Line) -> None:
        name = line.extra.get("request_id")
        if not isinstance(name, str):
            return
        if line.event == events.REQUEST_START and line.extra.get("validate"):
            self._validating.add(name)
            self._known.pop(name, None)  # an engine's line may have come before
        state = self._after(line)
        if state is None or name in self._validating:
            return
        request = self._known.setdefault(name, Request(state, line.end))
        if isinstance(replica := line.extra.get("replica"), int):
            request.replica = replica
        if line.end >= request.at:  # not what another file tells late
            request.state, request.at = state, line.end

    def count(self, replica: int | None = None) -> Counter[str]:
        """By state; of a replica, those that were last seen on it."""
        return Counter(request.state for request in self._of(replica))

    def _of(self, replica: int | None) -> Iterator[Request]:
        return (request for request in self._known.values() if replica is None or request.replica == replica)

    def _after(self, line: Line) -> str | None:
        if line.event == events.TOOL_EXECUTION:
            self._has_tools = True
        elif line.event == events.REQUEST_COMPLETE:
            self._has_tools = bool(self._has_tools)
        if line.event == events.TURN_ENGINE_CALL:
            if line.extra.get("finish_reason") == "abort":
                return PARKED
            return IN_REWARD if self._has_tools is False else IN_TOOL_OR_REWARD
        if line.event == events.REQUEST_ABORTED:
            return PARKED if line.extra.get("reason") == "cut off" else GIVEN_UP
        return _AFTER.get(line.event)
