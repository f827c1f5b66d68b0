"""What verl_mux writes into the event log, read from its source: which files name an event, and which words stand there.

A file of a room that logs writes the events that it names as `events.NAME`. Their keys are words of that file, or of the files
that make them (HANDED_IN).
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from verl_mux.profiling.eventlog import events

ROOT = Path(__file__).parents[3] / "verl_mux"
# Who logs. Elsewhere (the report, the launcher, the benches) events are read, or logged to be measured.
WRITERS = ("coordinator", "agent", "trainer", "rollout", "sync", "memory", "profiling/eventlog/log.py")
# Keys that come from elsewhere: event -> the files that make them.
_REQUEST, _STAY = "rollout/worker/request_log.py", "rollout/engine/serving.py"
HANDED_IN = {
    events.REQUEST_START: ["rollout/worker/agent_loop.py"],
    events.REQUEST_COMPLETE: ["rollout/worker/agent_loop.py"],
    **dict.fromkeys((events.TOOL_EXECUTION, events.REWARD, events.FINALIZATION), [_REQUEST]),
    events.ENGINE_QUEUE: [_STAY],
    events.ENGINE_GENERATE: [_STAY, "rollout/engine/sglang/manager.py"],
    events.STEP_REPORT: ["trainer/modes.py"],
    events.PHASE_OVERDUE: ["coordinator/core/leases.py"],
    events.ESTIMATE_ERROR: ["placement/estimator.py"],
}
LOGGING_CALL = re.compile(r"\b(?:log|span|part|note|event|Log|_log|_line)\(\s*\"(\w+)\"")


@cache
def written(level: str) -> dict[str, set[str]]:
    """Event -> all that may be a key of its `extra`, by those who log for `level`."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in _files(level):
        for name in re.findall(r"\bevents\.([A-Z_]+)\b", file.read_text()):
            if isinstance(value := getattr(events, name), str):
                found[value] |= _words(file)
    for name, words in found.items():
        words.update(*(_words(ROOT / path) for path in HANDED_IN.get(name, ())))
    return found


def bare_names(level: str) -> list[str]:
    """Calls that log a name of the table as a plain string."""
    named = ((file, name) for file in _files(level) for name in LOGGING_CALL.findall(file.read_text()))
    return [f"{file.relative_to(ROOT)}: {name}" for file, name in named if name in events.NAMES]


def _files(level: str) -> list[Path]:
    alone = {"coordinator", "agent"}  # rooms whose level is theirs
    paths = [ROOT / name for name in WRITERS if (name == level if level in alone else name not in alone)]
    return [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


def _words(file: Path) -> set[str]:
    """Strings and keywords: words in quotes or before `=`."""
    found = re.findall(r"[\"'](\w+)[\"']|\b(\w+)\s*[=:]", file.read_text())
    return {word for pair in found for word in pair if word}
