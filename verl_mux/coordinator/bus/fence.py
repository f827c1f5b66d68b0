"""The fence before device memory: calls under any but the current lease are refused.

Runs in every process that maps device memory; called by trainer/workers.py and rollout/engine/; pure.

    shut -> enter(token of a newer lease) -> open -> shut() -> enter(newer), or reopen(the same)

A call that was long on its way, or comes from a driver that did not notice its lease's end, carries another token than
the current one.
"""

from __future__ import annotations

from verl_mux.errors import Failure


class Fenced(Failure):
    """The call's lease is not the one under which this process may use its device now."""


class Fence:
    """One a process. Tokens only grow, so the highest one seen is that of the newest lease."""

    def __init__(self) -> None:
        self.highest = 0
        self.is_open = False

    def enter(self, token: int) -> None:
        """Before memory is mapped under a lease; the first such call of a newer lease opens the fence. Raises Fenced."""
        if token > self.highest:
            self.highest, self.is_open = token, True
        self.check(token)

    def check(self, token: int | None = None) -> None:
        """Before memory is used. None: under whichever lease is the current one. Raises Fenced."""
        if not self.is_open or token not in (None, self.highest):
            state = "open" if self.is_open else "shut"
            raise Fenced(f"refused under token {token}: the newest lease here is that of token {self.highest}, which is {state}")

    def shut(self) -> None:
        """The lease is given back, or may not be used until the coordinator answers again."""
        self.is_open = False

    def reopen(self, token: int) -> None:
        """The coordinator has answered: the lease still holds. Raises Fenced for any but the newest."""
        self.is_open = token == self.highest
        self.check(token)
