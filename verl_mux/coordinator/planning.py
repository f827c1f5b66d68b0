"""The placer's questions are answered in a thread of their own, one after the other, while the loop goes on granting leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from verl_mux.coordinator.core.inputs_and_instructions import Planned
from verl_mux.coordinator.core.placement import placing
from verl_mux.coordinator.core.placement.observing import Standing
from verl_mux.coordinator.core.placement.planner import Asked, Planner, nothing_follows
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.refusals import Refusals


class Planning:
    """`look` after every input. `take`: gives the answer to the state machine, in the loop. `clock`: seconds, as of its
    inputs."""

    def __init__(self, machine: Machine, take: Callable[[Planned], None], clock: Callable[[], float], refusals: Refusals) -> None:
        self._machine, self._take, self._clock, self._refusals = machine, take, clock, refusals
        self._planner = Planner()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verl-mux-placer")
        self._busy = False

    def look(self) -> None:
        """Asks the next question, if there is one and none is being answered."""
        if self._busy or not self._machine.state.questions:
            return
        now = self._clock()
        asked = placing.asked(self._machine.state, self._machine.config, now)
        if asked is not None:
            self._busy = True
            standing = Standing(self._machine.state, now)
            answering = asyncio.get_running_loop().run_in_executor(self._thread, self._planner.answer, asked, standing)
            answering.add_done_callback(lambda done: self._answered(asked, done))

    def _answered(self, asked: Asked, answering: asyncio.Future[Planned]) -> None:
        self._busy = False
        if answering.cancelled():
            return
        try:
            self._take(answering.result())
        except Exception as error:  # of the planner, or of the machine, which has taken it back: the next question is not to wait
            self._refusals.count("faults", f"placement: {type(asked.question).__name__}", error)
            self._planner = Planner()  # the old one remembers what did not come to be
            self._take(nothing_follows(asked))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
