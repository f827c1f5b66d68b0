"""What was wrong with the input of a report, by reason."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field


@dataclass
class Faults:
    """What was wrong with the input. `skipped`: lines lost, by reason. `noticed`: lines kept, by what was odd."""

    skipped: collections.Counter = field(default_factory=collections.Counter)
    noticed: collections.Counter = field(default_factory=collections.Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first place it was met

    def skip(self, reason: str, where: str, count: int = 1) -> None:
        self.skipped[reason] += count
        self.examples.setdefault(reason, where)

    def notice(self, reason: str, where: str, count: int = 1) -> None:
        self.noticed[reason] += count
        self.examples.setdefault(reason, where)

    def add(self, other: Faults) -> None:
        self.skipped.update(other.skipped)
        self.noticed.update(other.noticed)
        for reason, where in other.examples.items():
            self.examples.setdefault(reason, where)
