"""A whole job leaves its nodes in the middle of a phase, and comes back as if nothing had been.

    rollout   generation stops, engines sleep and keep their weights on the host --> the same weights, without a sync; what was
              cut off is generated again from its prompt
    train     actor, reference, critic and their optimizers go to the host --> each comes back from there

What the phase had not brought onto the device yet stays where it is: it comes there when the lease may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from verl_mux.coordinator.bus.client import Lease
from verl_mux.platform.charges import DeviceSettings
from verl_mux.trainer.phases import Phases


class EngineWeights:
    """Which weights the engines hold, and where. Pure.

    begin(version) -> filled() -> some replicas more or fewer* -> slept(level) -> begin(...)
                         '-------- slept(1), filled() in the middle of a rollout ----'
    """

    def __init__(self) -> None:
        self.version = 0  # of the weights that the rollout uses
        self.are_awake = False
        self.vacant: set[int] = set()  # replicas that went to sleep before the others, without their weights
        self._on_host: int | None = None

    def begin(self, version: int, vacant: Iterable[int] = ()) -> None:
        """A rollout with the weights of this version, on all replicas but those that have no nodes (yet)."""
        self.version, self.vacant = version, set(vacant)

    @property
    def need_sync(self) -> bool:
        """Waking does not bring back what the rollout uses."""
        return self._on_host != self.version

    def filled(self) -> None:
        self.are_awake, self._on_host = True, None

    def slept(self, level: int) -> None:
        """Those that were awake, at this level."""
        self.are_awake, self._on_host = False, self.version if level == 1 else None

    def replicas(self, count: int) -> list[int] | None:
        """Those that the rollout still has, of so many. None: all."""
        return [rank for rank in range(count) if rank not in self.vacant] if self.vacant else None


def sleep_level(settings: DeviceSettings, same_weights_next: bool) -> int:
    """1 keeps the weights on the host, 2 drops them."""
    if settings.sleep_level == "auto":
        return 1 if same_weights_next else 2
    return int(settings.sleep_level)


class _Trainer(Protocol):
    phases: Phases
    settings: Any
    global_steps: int
    weights: EngineWeights
    rollout_server_manager: Any
    rollout: Any
    trainer_is_awake: bool

    def held_replicas(self) -> Sequence[int] | None: ...
    def fill_engines(self) -> None: ...
    def sleep_trainer(self) -> None: ...
    def wake_trainer(self) -> None: ...
    def train_groups(self) -> list: ...


class Suspension:
    """Of one job. An init phase is not broken off: what starts up cannot be stopped half-way."""

    def __init__(self, trainer: _Trainer) -> None:
        self._trainer = trainer

    def suspend(self, lease: Lease) -> Callable[[], None]:
        """All that the lease's phase has on the device sleeps. Returns what takes it up again, under the same lease."""
        trainer = self._trainer
        if lease.phase == "rollout" and trainer.weights.are_awake:
            self._suspend_engines()
            return lambda: self._resume_engines(lease)
        if lease.phase == "train" and trainer.trainer_is_awake:
            trainer.sleep_trainer()
            return lambda: self._resume_training(lease)
        return lambda: None

    def _suspend_engines(self) -> None:
        trainer = self._trainer
        trainer.rollout.leave_lent()
        level = sleep_level(trainer.settings.device, same_weights_next=True)
        moved = trainer.rollout_server_manager.pause(trainer.held_replicas(), level)
        trainer.phases.moved("sleep", "rollout", trainer.global_steps, moved, log=False)
        trainer.weights.slept(level)

    def _resume_engines(self, lease: Lease) -> None:
        trainer = self._trainer
        trainer.rollout_server_manager.reopen(lease.token, trainer.held_replicas())
        trainer.fill_engines()

    def _resume_training(self, lease: Lease) -> None:
        for group in self._trainer.train_groups():
            group.mux_reopen(lease.token)
        self._trainer.wake_trainer()
