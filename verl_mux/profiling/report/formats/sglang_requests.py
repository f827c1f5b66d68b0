"""SGLang's own request log (`--log-requests`), as text (`[2026-03-02 09:00:01] Finish: obj=..., out={...}`) or as JSON lines
(`--log-requests-format json`). Each finished request becomes a stay in an engine; a file is a replica, by its name. The log
has no steps: a step is what ran without a moment in which no request did. Runs on the command line; called by foreign.py;
pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.formats.log_line import log_line

QUIET_S = 1.0  # without a request: a step is over
_TEXT = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)[^\]]*\] Finish: obj=.*?, out=(.*)")
_NUMBER = {
    key: re.compile(rf"'{key}': ([\d.eE+-]+)")
    for key in ("prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency", "queue_time")
}
_NAME = re.compile(r"'id': '([^']*)'")
_REASON = re.compile(r"'finish_reason': \{'type': '(\w+)'")


@dataclass(frozen=True)
class Finished:
    """A finished request. end: local time; `meta`: figures of its `meta_info`."""

    replica: str
    name: str
    end: datetime
    seconds: float
    reason: str | None
    meta: dict[str, Any]

    @property
    def start(self) -> datetime:
        return self.end - timedelta(seconds=self.seconds)


def parse(text: str, replica: str) -> Finished | None:
    """None for any other line."""
    if '"request.finished"' in text:
        try:
            line = json.loads(text[text.index("{") :])
            meta = line["out"]["meta_info"]
            end, name = datetime.fromisoformat(line["timestamp"]), str(meta.get("id", line["rid"]))
            reason = meta.get("finish_reason")
            why = reason["type"] if isinstance(reason, dict) else None
            return Finished(replica, name, end, float(meta["e2e_latency"]), why, meta)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
    if (found := _TEXT.search(text)) is None:
        return None
    meta = {key: float(value[1]) for key, pattern in _NUMBER.items() if (value := pattern.search(found[2]))}
    of, reasons = _NAME.search(found[2]), _REASON.search(found[2])
    if of is None or "e2e_latency" not in meta:
        return None
    end, why = datetime.fromisoformat(found[1]), reasons[1] if reasons else None
    return Finished(replica, of[1], end, meta["e2e_latency"], why, meta)


def lines(finished: list[Finished]) -> Iterator[dict[str, Any]]:
    """The events of all files together, with steps."""
    replicas = {name: number for number, name in enumerate(sorted({it.replica for it in finished}))}
    step, busy_until = 0, datetime.min
    for it in sorted(finished, key=lambda it: it.start):
        if it.start > busy_until + timedelta(seconds=QUIET_S):
            step += 1
        busy_until = max(busy_until, it.end)
        counted = {key: int(it.meta[name]) for key, name in _TOKENS.items() if isinstance(it.meta.get(name), (int, float))}
        where = {"request_id": it.name, "turn": 1, "replica": replicas[it.replica], "node": it.replica, **counted}
        where |= {"queue_sec": float(it.meta["queue_time"])} if isinstance(it.meta.get("queue_time"), (int, float)) else {}
        served, called = where | {"finish": it.reason}, where | {"finish_reason": it.reason}
        about = {"request_id": it.name, "turns": 1, "finish_reason": it.reason}
        yield log_line(it.end, events.ENGINE_GENERATE, it.seconds, served, step, "server", replicas[it.replica])
        yield log_line(it.end, events.TURN_ENGINE_CALL, it.seconds, called, step, "rollout")
        yield log_line(it.end, events.REQUEST_COMPLETE, it.seconds, about, step, "rollout")


_TOKENS = {"prompt_tokens": "prompt_tokens", "response_tokens": "completion_tokens", "cached_tokens": "cached_tokens"}
