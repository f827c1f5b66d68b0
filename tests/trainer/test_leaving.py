"""A trainer that is asked to move: on a made loop that calls what verl's does, in its order."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_mux.coordinator.bus.client import LocalMux
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.trainer import modes
from verl_mux.trainer.host_watch import HostWatch
from verl_mux.trainer.leaving import Leaving
from verl_mux.trainer.modes import PPOTrainerMuxSeparate
from verl_mux.trainer.phases import Phases
from verl_mux.worker_settings import WorkerSettings

NODES = {"rollout": ["r0"], "train": ["t0"]}
STEPS = 6


class Asking(LocalMux):
    """A coordinator that asks for move 3 while step `at` is done, and keeps what it is told."""

    def __init__(self, at: int) -> None:
        super().__init__("a", NODES)
        self.at, self.step, self.told = at, 0, []

    @property
    def move(self) -> int:
        return 3 if self.step >= self.at else 0

    def leave_to_move(self, move, step, saving_s):
        self.told.append(("left to move", move, step, saving_s >= 0))

    def close(self, reason=""):
        self.told.append(("closed", reason))


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Makes a trainer of STEPS steps, and runs it; `happened`: what it did, in order."""

    def run(at: int, note: bool = True, save_every: int = 100):
        happened = []
        trainer = object.__new__(PPOTrainerMuxSeparate)
        mux = Asking(at)
        trainer.phases, trainer.timing_raw = Phases(mux, NULL_LOG), {}
        trainer.settings = WorkerSettings(rollout_nodes=("r0",), train_nodes=("t0",))
        trainer.leaving = Leaving(mux, str(tmp_path / "note") if note else None)
        trainer.hosts = HostWatch({}, 0.0, print)
        trainer.rollout = SimpleNamespace(running=contextlib.nullcontext, save=lambda: None)
        trainer.global_steps, trainer.total_training_steps = 1, STEPS
        trainer.sleep_trainer = lambda: happened.append("asleep")
        trainer._shutdown_dump_executor = lambda: happened.append("dumps are written")
        saved = lambda self: happened.append(("saved", self.global_steps, self.phases.lease is not None))  # noqa: E731
        monkeypatch.setattr(PPOTrainer, "_save_checkpoint", saved)

        def fit(self, agent_loop_manager):
            while self.global_steps <= self.total_training_steps:
                self.on_step_begin()
                mux.step = self.global_steps
                happened.append(("step", self.global_steps))
                self.phases.begin("train", self.global_steps)
                if self.global_steps % save_every == 0:
                    self._save_checkpoint()
                self.on_step_end()
                happened.append("told")
                self.global_steps += 1

        monkeypatch.setattr(PPOTrainer, "fit", fit)
        monkeypatch.setattr(modes, "actors_of_rollout", lambda trainer: {})
        PPOTrainerMuxSeparate.fit(trainer, None)
        assert trainer.phases.lease is None
        return happened, mux.told, (tmp_path / "note")

    return run


def test_it_saves_at_the_end_of_its_step_and_leaves_before_the_next(made):
    happened, told, note = made(at=2)
    assert happened == [
        *(("step", 1), "asleep", "told"),
        *(("step", 2), ("saved", 2, True), "asleep", "told"),
        "dumps are written",
    ]
    assert told == [("left to move", 3, 2, True)] and "after step 2" in note.read_text()


def test_a_checkpoint_of_that_step_is_enough(made):
    happened, told, _ = made(at=2, save_every=2)
    assert [what for what in happened if what[0] == "saved"] == [("saved", 2, True)]
    assert told == [("left to move", 3, 2, True)]


def test_after_the_last_step_there_is_nothing_to_move(made):
    happened, told, note = made(at=STEPS)
    assert ("step", STEPS) in happened and not any(what[0] == "saved" for what in happened)
    assert told == [("closed", "")] and not note.exists()


def test_a_job_that_nobody_would_start_again_stays(made):
    happened, told, _ = made(at=1, note=False)
    assert [what[1] for what in happened if what[0] == "step"] == list(range(1, STEPS + 1))
    assert told == [("closed", "")]
