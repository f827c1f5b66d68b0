"""A machine that changes nothing when it fails: an input that raises what it should not is undone. Pure.

Copying the records before each input would cost more than handling it. So what is kept is an encoded copy of them from
some inputs ago and the inputs since; only a fault pays for going back, by replaying them.
"""

from __future__ import annotations

import msgspec

from verl_mux.coordinator.core.inputs_and_instructions import Input, Instruction
from verl_mux.coordinator.core.job_states import IllegalMove, UnknownJob
from verl_mux.coordinator.core.records import State
from verl_mux.coordinator.core.state import Machine

# Inputs, and their bytes, after which a new copy is made: what going back costs at most.
_INPUTS, _BYTES = 500, 2**20

_encode = msgspec.msgpack.Encoder().encode
_input = msgspec.msgpack.Decoder(Input)
_state = msgspec.msgpack.Decoder(State)


class Fault(Exception):
    """The machine raised what it should not (see the cause); its records are as they were before."""


class Rewind:
    """Around a machine; all its inputs go through `handle`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._copy_now()

    def handle(self, given: Input) -> list[Instruction]:
        """As Machine.handle; any other exception comes out as Fault."""
        keep = self._machine.changes(given)
        heard = self._machine.heard.get(getattr(given.what, "job", ""))
        try:
            out = self._machine.handle(given)
            encoded = _encode(given) if keep else b""
        except (IllegalMove, UnknownJob):
            raise
        except Exception as error:
            self._go_back(getattr(given.what, "job", ""), heard)
            raise Fault(f"{type(given.what).__name__}: {type(error).__name__}") from error
        if keep:
            self._keep(encoded)
        return out

    def _keep(self, encoded: bytes) -> None:
        self._since.append(encoded)
        self._bytes += len(encoded)
        if len(self._since) >= _INPUTS or self._bytes >= _BYTES:
            self._copy_now()

    def _copy_now(self) -> None:
        self._copy, self._since, self._bytes = _encode(self._machine.state), list[bytes](), 0
        self._config = self._machine.config

    def _go_back(self, job: str, heard: float | None) -> None:
        before = Machine(self._config, self._machine.epoch, _state.decode(self._copy))
        for encoded in self._since:
            before.handle(_input.decode(encoded))
        self._machine.state, self._machine.config = before.state, before.config
        self._machine.heard.pop(job, None)
        if heard is not None:
            self._machine.heard[job] = heard
