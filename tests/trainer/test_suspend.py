"""What a job asks of its engines and of its training workers when its lease may not be used, and afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from tests.trainer.fencing import Fencing
from verl_mux.memory.moved import Moved
from verl_mux.platform.charges import DeviceSettings
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.rollout.control.units import Unit
from verl_mux.trainer.modes import PPOTrainerMuxSeparate
from verl_mux.trainer.phases import Phases
from verl_mux.trainer.suspend import EngineWeights, Suspension
from verl_mux.worker_settings import WorkerSettings

MOVES = {"params": Moved(1, 1, 0.1)}


def nothing(*given):
    """Has nothing to do."""


class Job:
    """A trainer that went through no set-up, with two replicas, actor and critic. `asked`: what it asks of them, in order."""

    def __init__(self, sleep_level="auto"):
        self.asked = []
        self.trainer = trainer = object.__new__(PPOTrainerMuxSeparate)
        trainer.settings = WorkerSettings(
            rollout_nodes=("r0", "r1"), train_nodes=("t0",), device=DeviceSettings(sleep_level=sleep_level)
        )
        trainer.global_steps, trainer._rollout_began, trainer.weights = 5, 0.0, EngineWeights()
        trainer.phases = Phases(Fencing(), NULL_LOG)
        trainer.rollout = SimpleNamespace(
            own_nodes=None,
            lent_replicas=(),
            **dict.fromkeys(("nodes_are_held", "engines_are_back", "leave_lent", "is_over"), nothing),
        )
        trainer.rollout_server_manager = SimpleNamespace(
            get_replicas=lambda: [0, 1],
            move=lambda verb, tags, ranks, token, level: self.note(verb, tags, ranks, *([level] if verb == "sleep" else [])),
            pause=lambda ranks, level: self.note("pause", ranks, level),
            reopen=lambda token, ranks: self.note("reopen", ranks),
        )
        trainer.rollout_sync = SimpleNamespace(
            update_weights=lambda version, token, asleep: dict(self.note("sync", version, *asleep))
        )
        trainer.train_groups = lambda: [self.group(name) for name in ("actor", "critic")]

    def group(self, name):
        told = lambda verb: lambda *token: self.note(name, verb, *token) or [MOVES]  # noqa: E731
        return SimpleNamespace(**{f"mux_{verb}": told(verb) for verb in ("sleep", "reopen", "wake")})

    def note(self, *what):
        self.asked.append(what)
        return []

    def fenced(self):
        """Its lease may not be used for a while. Returns what was asked then, and what afterwards."""
        self.asked.clear()
        go_on = Suspension(self.trainer).suspend(self.trainer.phases.lease)
        then = list(self.asked)
        self.asked.clear()
        go_on()
        return then, list(self.asked)


WAKE = [("wake", ["weights"], None), ("wake", ["kv_cache"], None)]


def test_a_suspended_rollout_keeps_its_weights_on_the_host_and_needs_no_sync():
    job = Job()
    job.trainer._begin_rollout(4)
    assert job.asked == [WAKE[0], ("sync", 4), WAKE[1]]
    for _ in range(2):
        assert job.fenced() == ([("pause", None, 1)], [("reopen", None), *WAKE])
    job.trainer._end_rollout()
    # What was on the host for its own sake is not taken for the next step's weights.
    job.trainer._begin_rollout(5)
    assert job.asked[-4:] == [("sleep", None, None, 2), WAKE[0], ("sync", 5), WAKE[1]]


def test_weights_that_may_not_stay_on_the_host_come_by_a_sync():
    job = Job(sleep_level="2")
    job.trainer._begin_rollout(4)
    assert job.fenced() == ([("pause", None, 2)], [("reopen", None), WAKE[0], ("sync", 4), WAKE[1]])


def test_weights_come_by_a_sync_to_those_that_are_left_too():
    job = Job(sleep_level="2")
    job.trainer._begin_rollout(4)
    job.trainer.vacate(Unit(replicas=(1,), nodes=("r1",), servers=("s1",)))
    held = [(verb, tags, [0]) for verb, tags, _ in WAKE]
    assert job.fenced() == ([("pause", [0], 2)], [("reopen", [0]), held[0], ("sync", 4, 1), held[1]])


def test_a_rollout_that_gave_nodes_back_comes_back_on_the_others():
    job = Job()
    job.trainer._begin_rollout(4)
    job.trainer.vacate(Unit(replicas=(1,), nodes=("r1",), servers=("s1",)))
    assert job.asked[-1] == ("sleep", None, (1,), 2)
    held = [(verb, tags, [0]) for verb, tags, _ in WAKE]
    assert job.fenced() == ([("pause", [0], 1)], [("reopen", [0]), *held])
    # Some of the engines have no copy, so after a validation too the next rollout begins with a sync.
    job.trainer._end_rollout(same_weights_next=True)
    job.trainer._begin_rollout(4)
    assert job.asked[-4:] == [("sleep", None, None, 2), WAKE[0], ("sync", 4), WAKE[1]]


def test_what_a_phase_has_not_taken_up_yet_is_left_to_it():
    """A worker refuses to reopen under a lease under which it was never woken, so this ended the job."""
    job = Job()
    for phase in ("rollout", "train"):
        job.trainer.phases.begin(phase, 5)
        assert job.fenced() == ([], [])
        job.trainer.phases.end()


def test_after_a_validation_whose_weights_are_on_the_host_a_suspension_changes_nothing():
    job = Job()
    job.trainer._begin_rollout(4)
    job.trainer._end_rollout(same_weights_next=True)
    job.trainer.phases.begin("rollout", 5)
    assert job.fenced() == ([], [])
    job.trainer.phases.end()
    job.trainer._begin_rollout(4)
    assert job.asked == WAKE


def test_a_suspended_training_phase_goes_to_the_host_with_all_its_models_and_comes_back_under_its_lease():
    job = Job()
    lease = job.trainer.phases.begin("train", 5)
    job.trainer.wake_trainer()
    slept, woken = job.fenced()
    assert slept == [("actor", "sleep"), ("critic", "sleep")]
    names = ("actor", "critic")
    assert woken == [*((name, "reopen", lease.token) for name in names), *((name, "wake", lease.token) for name in names)]
    job.trainer.sleep_trainer()
    assert job.fenced() == ([], [])
