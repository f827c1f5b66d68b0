"""A job's phases against a real coordinator; a trainer that is asked to move, on a made loop that calls what verl's does."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.trainer.fencing import NODES, Fencing, bare_trainer, made_ready
from verl_mux.coordinator.bus.client import LeaseLost, LocalMux, connect
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.profiling.eventlog.log import NULL_LOG, EventLog
from verl_mux.trainer.modes import PPOTrainerMuxSeparate
from verl_mux.trainer.phases import Leaving, Phases


@pytest.fixture
def coordinator():
    pools = {side: {"nodes": [{"name": name} for name in names]} for side, names in NODES.items()}
    with Coordinator(make_config({"pools": pools})) as running:
        yield running


@pytest.fixture
def phases(coordinator, tmp_path):
    log = EventLog(tmp_path, worker=0, role="trainer", job="a")
    made = Phases(connect(coordinator.address, "a", NODES, uid="a:1"), log)
    yield made
    made.mux.close()
    log.close()


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as executor:
        yield executor


def holders(coordinator) -> list[str]:
    pools = coordinator.snapshot()["pools"].values()
    return [h["job"] for pool in pools for node in pool["nodes"].values() for h in node["holders"]]


def test_a_phase_is_in_the_log_before_its_nodes_are_anybody_elses(phases, monkeypatch):
    order = []
    release, log = phases.mux.release, phases.log.log
    monkeypatch.setattr(phases.mux, "release", lambda lease: (order.append("release"), release(lease)))
    monkeypatch.setattr(phases.log, "log", lambda event, *a, **k: (order.append(event), log(event, *a, **k)))
    phases.begin("rollout", step=1)
    phases.end()
    assert order[-2:] == ["phase", "release"]


def test_a_job_that_fails_with_a_lease_keeps_it_while_its_processes_live(phases, coordinator):
    phases.begin("train", step=1)
    phases.fail("its driver ended with ValueError")
    deadline = time.monotonic() + 60
    while (job := coordinator.snapshot()["jobs"]["a"])["state"] == "live" and time.monotonic() < deadline:
        time.sleep(0.01)
    # This process is the job's driver, and it lives.
    assert (holders(coordinator), job["state"]) == (["a"], "dying") and "ValueError" in json.dumps(job)


def test_a_job_that_fails_with_nothing_held_leaves_as_any_other(phases, coordinator):
    phases.begin("train", step=1)
    phases.end()
    phases.fail("its driver ended with ValueError")
    job = coordinator.snapshot()["jobs"]["a"]
    assert (holders(coordinator), job["state"], job["reason"]) == ([], "ended", "its driver ended with ValueError")


@pytest.fixture
def fencing():
    made = Phases(Fencing(), NULL_LOG)
    made.begin("train", step=1)
    return made


def test_a_fenced_lease_is_put_to_sleep_between_two_uses_and_taken_up_before_the_next(fencing, pool):
    order, using, may_end = [], threading.Event(), threading.Event()
    fencing.guard(lambda lease: order.append("sleep") or asleep.set() or (lambda: order.append("wake")))
    asleep = threading.Event()

    def use(name, wait=False):
        with fencing.part(name, 1):
            order.append(name)
            using.set()
            assert not wait or may_end.wait(60)

    first = pool.submit(use, "first", wait=True)
    assert using.wait(60)
    fencing.mux.usable.clear()
    fence = pool.submit(fencing.mux.fence)
    assert order == ["first"]
    may_end.set()
    first.result(60)
    assert asleep.wait(60)
    second = pool.submit(use, "second")
    ending = pool.submit(fencing.end)
    fencing.mux.usable.set()
    for done in (fence, second, ending):
        done.result(60)
    assert order == ["first", "sleep", "wake", "second"]


def test_a_lease_that_does_not_come_back_is_not_taken_up(fencing):
    order = []
    fencing.guard(lambda lease: order.append("sleep") or (lambda: order.append("wake")))
    fencing.mux.failed = "evicted"
    fencing.mux.fence()
    assert order == ["sleep"]
    with pytest.raises(LeaseLost), fencing.part("update_actor", 1):
        pass


def test_a_job_that_cannot_take_its_memory_up_again_fails(fencing):
    fencing.guard(lambda lease: lambda: 1 / 0)
    fencing.mux.fence()
    assert fencing.mux.failed == "it could not take its memory up again"


def test_a_use_within_a_use_does_not_wait_and_without_a_lease_there_is_nothing_to_put_to_sleep(fencing):
    with fencing.using():
        fencing.mux.usable.clear()
        with fencing.using():
            pass
    fencing.mux.usable.set()
    fencing.end()
    fencing.guard(pytest.fail)
    fencing.mux.fence()


# ---------------------------------------------------------------- asked to move

STEPS = 6


class Asking(LocalMux):
    """A coordinator that asks for move 3 while step `at` is done, and keeps the messages that it gets."""

    def __init__(self, at: int) -> None:
        super().__init__("a", NODES)
        self.at, self.step, self.noted = at, 0, []

    @property
    def move(self) -> int:
        return 3 if self.step >= self.at else 0

    def leave_to_move(self, move, step, saving_s):
        self.noted.append(("left to move", move, step, saving_s >= 0))

    def close(self, reason=""):
        self.noted.append(("closed", reason))


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Makes a trainer of STEPS steps, and runs it; `happened`: what it did, in order."""

    def run(at: int, note: bool = True, save_every: int = 100):
        happened = []
        mux = Asking(at)
        trainer = bare_trainer(phases=Phases(mux, NULL_LOG), timing_raw={}, total_training_steps=STEPS)
        trainer.leaving = Leaving(mux, str(tmp_path / "note") if note else None)
        trainer.config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}})
        trainer.prompts = SimpleNamespace(window=None)
        trainer.sleep_states = lambda: happened.append("asleep")
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
                happened.append("noted")
                self.global_steps += 1

        monkeypatch.setattr(PPOTrainer, "fit", fit)
        made_ready(trainer, monkeypatch)
        PPOTrainerMuxSeparate.fit(trainer, SimpleNamespace(agent_loop_workers=[]))
        assert trainer.phases.lease is None
        return happened, mux.noted, (tmp_path / "note")

    return run


def test_it_saves_at_the_end_of_its_step_and_leaves_before_the_next(made):
    happened, noted, note = made(at=2)
    assert happened == [
        *(("step", 1), "asleep", "noted"),
        *(("step", 2), ("saved", 2, True), "asleep", "noted"),
        "dumps are written",
    ]
    assert noted == [("left to move", 3, 2, True)] and "after step 2" in note.read_text()


def test_a_checkpoint_of_that_step_is_enough(made):
    happened, noted, _ = made(at=2, save_every=2)
    assert [what for what in happened if what[0] == "saved"] == [("saved", 2, True)]
    assert noted == [("left to move", 3, 2, True)]


def test_after_the_last_step_there_is_nothing_to_move(made):
    happened, noted, note = made(at=STEPS)
    assert ("step", STEPS) in happened and not any(what[0] == "saved" for what in happened)
    assert noted == [("closed", "")] and not note.exists()


def test_a_job_that_no_launcher_would_start_again_stays(made):
    happened, noted, _ = made(at=1, note=False)
    assert [what[1] for what in happened if what[0] == "step"] == list(range(1, STEPS + 1))
    assert noted == [("closed", "")]
