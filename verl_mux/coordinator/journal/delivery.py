"""What the state machine says goes out when what it follows from is on disk; inputs that came together share one write."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import Input, Instruction, Send
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.journal.journal import Journal

# So many inputs are written together at most, even when more come without a pause.
MOST_TOGETHER = 256
# Told for people to see: these may wait for the next write, and the last ones be lost.
_FOR_PEOPLE = (m.Progress, m.PhaseNote, m.MemoryReport)


class Delivery:
    """`carry_out` does what an instruction says. `soon` calls a function when all that has come was taken.

    While the journal cannot be written, what follows from changes waits; signs of life are answered.
    """

    def __init__(
        self,
        journal: Journal,
        machine: Machine,
        carry_out: Callable[[Instruction], None],
        soon: Callable[[Callable[[], None]], object],
    ):
        self._journal, self._machine = journal, machine
        self._carry_out, self._soon = carry_out, soon
        self._waiting: list[Instruction] = []
        self._taken = 0

    def take(self, given: Input, instructions: list[Instruction], keep: bool) -> None:
        """`keep`: the input has changed something."""
        if keep:
            self._journal.append(given)
        if _can_wait(given, instructions) or (not keep and not self._taken and self._journal.blocked is None):
            return self._do(instructions)
        if self._journal.blocked is not None:
            self._do(instruction for instruction in instructions if _is_ack(instruction))
            instructions = [instruction for instruction in instructions if not _is_ack(instruction)]
        self._waiting += instructions
        self._taken += 1
        if self._taken == 1:
            self._soon(self.flush)
        elif self._taken % MOST_TOGETHER == 0:
            self.flush()

    def flush(self) -> None:
        """To be called now and then: it also writes what could wait, and tries again what could not be written."""
        self._taken = 0
        if self._journal.blocked is not None:
            self._waiting = _each_once(self._waiting)
        if self._journal.commit(self._machine):
            waiting, self._waiting = self._waiting, []
            self._do(waiting)

    def _do(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            self._carry_out(instruction)


def _can_wait(given: Input, instructions: list[Instruction]) -> bool:
    return isinstance(given.what, _FOR_PEOPLE) and not any(isinstance(instruction, Send) for instruction in instructions)


def _is_ack(instruction: Instruction) -> bool:
    return isinstance(instruction, Send) and isinstance(instruction.message, m.HeartbeatAck)


def _each_once(instructions: list[Instruction]) -> list[Instruction]:
    """Clients ask again every second; one answer is enough."""
    found: dict[object, Instruction] = {}
    for number, instruction in enumerate(instructions):
        key = (instruction.client, m.encode(instruction.message)) if isinstance(instruction, Send) else number
        found.setdefault(key, instruction)
    return list(found.values())
