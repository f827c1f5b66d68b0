"""A clock for silence: it stands still while the coordinator itself does. Pure."""

from __future__ import annotations

# More between two looks at the clock is a pause of the coordinator itself, or a clock that was set: nobody was silent then.
PAUSE_S = 1.0


class RunningTime:
    """Seconds for which the coordinator has run, told from the times at which it looked at its clock."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked: float | None = None

    def at(self, now: float) -> float:
        looked = now if self._looked is None else self._looked
        return self._seconds + (now - looked if 0 <= now - looked <= PAUSE_S else 0.0)

    def look(self, now: float) -> float:
        self._seconds, self._looked = self.at(now), now
        return self._seconds
