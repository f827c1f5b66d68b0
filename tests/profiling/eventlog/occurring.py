"""What occurs in the event logs of real runs, beside the table of events."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from verl_mux.profiling.eventlog import events

# Which level of the table a role's lines belong to.
LEVELS = {
    "rollout": {"request"},
    "server": {"server replica", "step of the trainer"},  # an engine's sleep and wake are logged by its server
    "trainer": {"step of the trainer", "step of a rollout worker"},
    "coordinator": {"coordinator"},
    "agent": {"agent"},
}


def keys_by_event(directories: Iterable[Path]) -> dict[tuple[str, str], set[str]]:
    """(role, event) -> all keys of `extra` that have a value in some line."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for directory in directories:
        for path in directory.rglob("worker_*.jsonl"):
            for text in path.read_text().splitlines():
                line = json.loads(text) if text.endswith("}") else None
                if line:
                    has = {key for key, value in (line.get("extra") or {}).items() if value is not None}
                    found[line["role"], line["event"]] |= has
    return dict(found)


def documented_keys(event: events.Event) -> set[str]:
    return set(re.findall(r"(\w+)(?: \([^)]*\))?(?:, |$)", event.extra))


def rows(role: str, name: str) -> list[events.Event]:
    """The table's rows for an event that this role logs."""
    return [e for e in events.TABLE if e.name == name and e.level in LEVELS[role] | {"the log itself"}]


def undocumented(found: dict[tuple[str, str], set[str]]) -> set[tuple[str, str, str]]:
    """(role, event, key) that occurs and is not in the table; key "" where the event itself is not."""
    odd = set()
    for (role, name), keys in found.items():
        known = [event for event in rows(role, name) if event.written]
        if not known:
            odd.add((role, name, ""))
            continue
        odd |= {(role, name, key) for key in keys - {"error"} - set().union(*map(documented_keys, known))}
    return odd


def missing(found: dict[tuple[str, str], set[str]]) -> set[str]:
    """`event` and `event.key` of the table that do not occur."""
    absent: set[str] = set()
    for event in (event for event in events.TABLE if event.written):
        roles = [role for role, levels in LEVELS.items() if event.level in levels or event.level == "the log itself"]
        seen = [found[role, event.name] for role in roles if (role, event.name) in found]
        if not seen:
            absent |= {event.name} - {name for _, name in found}
        else:
            absent |= {f"{event.name}.{key}" for key in documented_keys(event) - set().union(*seen)}
    return absent
