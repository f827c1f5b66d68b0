"""What occurs in the event logs of real runs, beside the table of events.

python -m tests.profiling.eventlog.occurring DIR [DIR ...] prints the share of documented events and keys that occur there, and
which do not and why; it ends with 1 where there is no such reason, or where something occurs that is not documented.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.profiling.eventlog.why_absent import LACKING, WITHOUT
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


def reasons(found: dict[tuple[str, str], set[str]]) -> dict[str, set[str]]:
    """Why something does not occur -> what: events and `event.key`s. "": for no reason that is known."""
    absent, told = missing(found), defaultdict(set)
    roles = {role for role, _ in found}
    why = {name: reason for reason, names in LACKING.items() if absent.issuperset(names) for name in names}
    why |= {e.name: WITHOUT[role] for role in WITHOUT.keys() - roles for e in events.TABLE if e.level in LEVELS[role]}
    for name in absent:
        told[why.get(name, "")].add(name)
    return dict(told)


def main() -> None:
    found = keys_by_event(Path(name) for name in sys.argv[1:])
    told, odd = reasons(found), undocumented(found)
    absent = set().union(*told.values())
    documented = [event for event in events.TABLE if event.written]
    names = {event.name for event in documented}
    keys = {f"{event.name}.{key}" for event in documented for key in documented_keys(event)}
    lost = absent | {key for key in keys if key.partition(".")[0] in absent}
    for kind, all_ in (("events", names), ("keys", keys)):
        print(f"{kind}: {len(all_ - lost)} of {len(all_)} ({len(all_ - lost) / len(all_):.0%})")
    for reason, those in sorted(told.items()):
        print(f"  {reason or 'NO REASON KNOWN'}: {', '.join(sorted(those))}")
    for role, event, key in sorted(odd):
        print(f"  NOT DOCUMENTED: {role} {event} {key}")
    sys.exit(bool(odd or told.get("")))


if __name__ == "__main__":
    main()
