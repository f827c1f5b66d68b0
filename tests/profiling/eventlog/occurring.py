"""The table of events in docs/event_log.md, and what occurs in the event logs of real runs beside it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Event(NamedTuple):
    """A row of the table. written: by verl_mux; else only read, in other logs. unwritten: keys that are read but not written."""

    name: str
    level: str
    meaning: str
    extra: str
    origin: str = ""
    written: bool = True
    unwritten: str = ""


# Which level of the table a role's lines belong to.
LEVELS = {
    "rollout": {"request"},
    "server": {"server replica", "step of the trainer"},  # an engine's sleep and wake are logged by its server
    "trainer": {"step of the trainer", "step of a rollout worker"},
    "coordinator": {"coordinator"},
    "agent": {"agent"},
}
ALL_LEVELS = {"the log itself"}.union(*LEVELS.values())


def _table() -> list[Event]:
    lines = (Path(__file__).parents[3] / "docs" / "event_log.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    rows = [[name.strip("`"), *more] for name, *more in cells if more[0] in ALL_LEVELS]
    written = [Event(*row) for row in rows if len(row) == 5]
    more = {(row[0], row[1]): row[3] for row in rows if row[2:3] == ["as above"]}
    others = [Event(*row, written=False) for row in rows if len(row) == 4 and row[2] != "as above"]
    return [event._replace(unwritten=more.get(event[:2], "")) for event in written] + others


TABLE = _table()


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


def documented_keys(event: Event) -> set[str]:
    return set(re.findall(r"(\w+)(?: \([^)]*\))?(?:, |$)", event.extra))


def rows(role: str, name: str) -> list[Event]:
    """The table's rows for an event that this role logs."""
    return [e for e in TABLE if e.name == name and e.level in LEVELS[role] | {"the log itself"}]


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
    for event in (event for event in TABLE if event.written):
        roles = [role for role, levels in LEVELS.items() if event.level in levels or event.level == "the log itself"]
        seen = [found[role, event.name] for role in roles if (role, event.name) in found]
        if not seen:
            absent |= {event.name} - {name for _, name in found}
        else:
            absent |= {f"{event.name}.{key}" for key in documented_keys(event) - set().union(*seen)}
    return absent
