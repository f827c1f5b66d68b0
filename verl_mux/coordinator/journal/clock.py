"""The time that the coordinator reckons with: seconds that only grow, through restarts and reboots; no wall clock moves them."""

from __future__ import annotations

import time

import msgspec

from verl_mux.coordinator.bus import boot


class Clock(msgspec.Struct, frozen=True):
    """`offset` to the time since the boot named `boot`, so that what a journal says of an earlier boot stays comparable."""

    boot: str
    offset: float = 0.0

    def now(self) -> float:
        return boot.seconds() + self.offset

    def wall(self, then: float) -> float:
        """Epoch seconds of a moment of this clock: for people to read, never to reckon with."""
        return time.time() - (self.now() - then)

    def going_on(self, last: float) -> Clock:
        """For a coordinator that starts now, where one of this clock came as far as `last`.

        After a reboot it goes on from there: how long the machine was off, only the wall clock could say.
        """
        same_boot = self.boot == boot.boot_id() and self.now() >= last
        return self if same_boot else Clock(boot.boot_id(), last - boot.seconds())


def new_clock() -> Clock:
    return Clock(boot.boot_id())
