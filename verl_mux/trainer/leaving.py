"""A job that the coordinator asks to move: it saves at the end of its step, and leaves before the next one begins.

Whoever started it finds the note that it leaves, and starts it again: verl then goes on from the checkpoint
(`trainer.resume_mode=auto`), on the nodes that the coordinator keeps for it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from verl_mux.coordinator.bus.client import LocalMux


class LeavesToMove(Exception):
    """Ends verl's fit between two steps."""


class _Trainer(Protocol):
    global_steps: int
    total_training_steps: int

    def _save_checkpoint(self) -> None: ...


class Leaving:
    """asked by the coordinator -> `save` at a step's end -> `before_step` raises LeavesToMove -> `leave_note` -> `say_goodbye`.
    `note`: see `mux.move_note`; without one nobody would start the job again, and it stays."""

    def __init__(self, mux: LocalMux, note: str | None) -> None:
        self._mux, self._note = mux, note
        self._saved = 0  # the last step with a checkpoint
        self._move, self._step, self._saving_s = 0, 0, 0.0

    def saved(self, step: int) -> None:
        """A checkpoint was written, for whatever reason."""
        self._saved = step

    def save(self, trainer: _Trainer) -> None:
        """At the end of a step, while the states are on the device. After the last step there is nothing to move."""
        move, step = self._mux.move, trainer.global_steps
        if not move or self._note is None or step >= trainer.total_training_steps:
            return
        began = time.perf_counter()
        if self._saved != step:
            trainer._save_checkpoint()
        self._move, self._step, self._saving_s = move, step, time.perf_counter() - began

    def before_step(self) -> None:
        """All of the step before is done and told by now."""
        if self._move:
            raise LeavesToMove

    def leave_note(self) -> None:
        """Raises OSError: then the job fails, and its checkpoint is there for a restart."""
        assert self._note is not None
        Path(self._note).write_text(f"left after step {self._step} to move\n")

    def say_goodbye(self) -> None:
        """In place of `close`, of a job that leaves to move."""
        self._mux.leave_to_move(self._move, self._step, self._saving_s)
