"""Where every generation enters an engine: refused under no lease, held up while the job's lease may not be used.

    shut -> enter(token) -> open -> pause() -> reopen(token), passed() -> open -> ... -> shut()

When a pause ends, each request that it cut off begins again from its prompt. The client sees only that the request takes longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from verl_mux.coordinator.bus.fence import Fence

_Output = TypeVar("_Output")


class Passage:
    """One an engine server."""

    def __init__(self) -> None:
        self.fence = Fence()
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._pauses = 0

    def pause(self) -> None:
        """The lease may not be used: nothing enters any more. What runs is the caller's to stop."""
        self.fence.shut()
        self._may_pass.clear()
        self._pauses += 1

    def passed(self) -> None:
        """The engine is ready again."""
        self._may_pass.set()

    async def through(self, generate: Callable[[], Awaitable[_Output]], was_cut: Callable[[_Output], bool]) -> _Output:
        """Generates, once more for each pause that cut it off. Raises Fenced where there is no lease."""
        while True:
            await self._may_pass.wait()
            self.fence.check()
            pauses = self._pauses
            output = await generate()
            if pauses == self._pauses or not was_cut(output):
                return output
