"""What a training process calls of a CUDA device and of verl's engines, in which order, while its job takes turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from tests.trainer.fencing import NODES, Fencing
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.fence import Fence, Fenced
from verl_mux.errors import Failure
from verl_mux.memory.residents import Residents
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.trainer import workers
from verl_mux.trainer.modes import PPOTrainerMuxSeparate
from verl_mux.trainer.phases import Leaving, Phases
from verl_mux.trainer.workers import MuxActorWorker, MuxTrainingWorker
from verl_mux.worker_settings import WorkerSettings

# Of an engine that leaves, and of one that comes back.
LEAVES = ["synchronize", "empty_cache", "empty_host_cache"]
LOOKS = ["empty_cache", "mem_get_info"]


@pytest.fixture
def process(cuda, monkeypatch):
    """A training process: the worker of actor and reference, and the critic's, which have just started."""
    residents = Residents()
    monkeypatch.setattr(workers, "residents", residents)
    monkeypatch.setattr(workers, "are_row_shards", lambda module, quantized: True)  # they are sent from the host copy
    actor, critic = object.__new__(MuxActorWorker), object.__new__(MuxTrainingWorker)
    actor._fence, actor._who, actor._exported = Fence(), "actor", None
    critic._fence = Fence()
    actor.actor, actor.ref = (SimpleNamespace(engine=cuda.engine(role)) for role in ("actor", "ref"))
    critic.engine = cuda.engine("critic")
    residents.arrived("actor")
    residents.arrived("critic")
    return SimpleNamespace(actor=actor, critic=critic, engines=(actor.actor.engine, actor.ref.engine, critic.engine))


def left(process):
    """Both workers sleep. Returns their bytes that are on the device by then."""
    return [sum(moved.mapped for moved in worker.mux_sleep().values()) for worker in (process.actor, process.critic)]


def test_all_engines_leave_before_the_process_says_what_it_holds(cuda, process):
    assert left(process) == [0, 0] and cuda.device.held == 0
    assert cuda.calls == [("actor", "cpu"), *LEAVES, ("ref", "cpu"), *LEAVES, ("critic", "cpu"), *LEAVES]


@pytest.mark.parametrize("which", range(3))
def test_a_process_whose_states_did_not_leave_gives_no_lease_back(cuda, process, which):
    cuda.bytes_each, cuda.device.held = 10**9, 3 * 10**9
    process.engines[which].place = lambda here: None
    with pytest.raises(Failure, match="1.00 of 3.00 GB did not leave the device"):
        left(process)


def test_room_is_looked_for_before_anything_is_mapped(cuda, process):
    left(process)
    cuda.calls.clear()
    assert sum(moved.mapped for moved in process.actor.mux_wake(1).values()) == 200
    process.critic.mux_wake(1)
    awake = [(*LOOKS, (role, "cuda"), "synchronize") for role in ("actor", "critic")]
    assert cuda.calls == [*awake[0], ("ref", "cuda"), "synchronize", *awake[1]]


def test_a_wake_without_room_maps_nothing_and_names_who_holds_what(cuda, process):
    left(process)
    cuda.calls.clear()
    cuda.device.size = 100  # of actor and reference only one would fit
    with pytest.raises(Failure, match="no room to wake: the actor's states take .* held by process 7 uses 9 MB"):
        process.actor.mux_wake(1)
    assert cuda.calls == LOOKS and cuda.device.held == 0


def test_room_that_goes_while_the_actor_wakes_takes_back_what_was_mapped(cuda, process):
    left(process)

    def full(*_, **__):
        process.actor.ref.engine.to = lambda *_, **__: None
        raise torch.OutOfMemoryError("CUDA out of memory")

    process.actor.ref.engine.to = full
    with pytest.raises(Failure, match="no room to wake the actor's states: CUDA out of memory"):
        process.actor.mux_wake(1)
    assert cuda.device.held == 0


def test_a_call_of_an_older_lease_moves_nothing(cuda, process):
    left(process)
    process.actor.mux_wake(2)
    left(process)
    cuda.calls.clear()
    for worker in (process.actor, process.critic):
        worker._fence.enter(3)
        with pytest.raises(Fenced):
            worker.mux_wake(2)
    assert cuda.calls == []


# ---------------------------------------------------------------- verl's own engine, by strategy


class Moves:
    """verl's functions that move a module or an optimizer, by name."""

    def __init__(self, monkeypatch):
        self.called = []
        monkeypatch.setattr(transformer_impl, "get_device_name", lambda: "cuda")
        for name in ("load_fsdp_model_to_gpu", "offload_fsdp_model_to_cpu", "load_fsdp_optimizer", "offload_fsdp_optimizer"):
            monkeypatch.setattr(transformer_impl, name, lambda *_, name=name: self.called.append(name))


def engine(optimizer, **config):
    """One of verl's that went through no set-up."""
    made = object.__new__(FSDPEngine)
    made.engine_config = SimpleNamespace(**{"strategy": "fsdp2", "forward_only": False, "offload_policy": False, **config})
    made.module, made.optimizer = torch.nn.Linear(2, 2), optimizer
    made._is_offload_param = made._is_offload_optimizer = not (
        made.engine_config.offload_policy or made.engine_config.forward_only
    )
    return made


@pytest.mark.parametrize(
    ("optimizer", "config", "moved"),
    [(object(), {"strategy": "fsdp"}, True), (object(), {}, True), (None, {"forward_only": True}, False)],
)
def test_verls_engine_moves_all_of_a_trained_model_once_and_leaves_a_frozen_one_to_fsdp(
    cuda, monkeypatch, optimizer, config, moved
):
    awake = ["load_fsdp_model_to_gpu", "load_fsdp_optimizer"] if moved else []
    asleep = ["offload_fsdp_model_to_cpu", "offload_fsdp_optimizer"] if moved else []
    states = workers.DeviceStates("critic", engine(optimizer, **config))
    moves = Moves(monkeypatch)
    states.wake()
    assert moves.called == awake
    states.sleep()
    assert moves.called == awake + asleep
    assert cuda.calls == ["synchronize", *LEAVES]


# ---------------------------------------------------------------- the whole order


class Lease(Fencing):
    """Leases that are told among the device's calls."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def acquire(self, phase, step, nodes=None):
        lease = super().acquire(phase, step=step, nodes=nodes)
        self.calls.append(f"{phase} lease")
        return lease

    def release(self, lease):
        self.calls.append(f"{lease.phase} lease back")
        super().release(lease)


def group(worker):
    """A worker group of one rank."""
    return SimpleNamespace(mux_wake=lambda token: [worker.mux_wake(token)], mux_sleep=lambda: [worker.mux_sleep()])


@pytest.fixture
def trainer(cuda, process):
    """Between the rollout of a step and its training; its workers sleep."""
    left(process)
    cuda.calls.clear()
    made = object.__new__(PPOTrainerMuxSeparate)
    made.settings = WorkerSettings(rollout_nodes=tuple(NODES["rollout"]), train_nodes=tuple(NODES["train"]))
    made.global_steps, made.curr_step_profile, made.timing_raw = 1, False, {}
    made.total_training_steps, made.leaving = 9, Leaving(connect(None, "a", NODES), None)
    made.phases = SimpleNamespace(lease="init", mux=None)
    made.actor_rollout_wg, made.critic_wg = group(process.actor), group(process.critic)
    made.phases = Phases(Lease(cuda.calls), NULL_LOG)
    made._end_rollout = lambda: cuda.calls.append("engines sleep")
    return made


def test_a_training_phase_from_its_lease_to_the_next_jobs(cuda, process, trainer):
    trainer.on_sample_end()
    for engine in process.engines:
        for mode in ("eval", "train"):  # verl's calls find the states where they are
            with transformer_impl.BaseEngineCtx(engine, mode):
                cuda.calls.append((mode, engine.here))
    trainer.on_step_end()
    assert cuda.calls == [
        "engines sleep", "train lease",
        *LOOKS, ("actor", "cuda"), "synchronize", ("ref", "cuda"), "synchronize", *LOOKS, ("critic", "cuda"), "synchronize",
        *[("eval", True), ("train", True)] * 3,
        ("actor", "cpu"), *LEAVES, ("ref", "cpu"), *LEAVES, ("critic", "cpu"), *LEAVES,
        "train lease back",
    ]  # fmt: skip


def test_a_lease_is_kept_while_states_are_still_on_the_device(cuda, process, trainer):
    cuda.bytes_each = 10**9
    trainer.on_sample_end()
    process.critic.engine.place = lambda here: None
    with pytest.raises(Failure, match="did not leave the device"):
        trainer.on_step_end()
    assert "train lease back" not in cuda.calls and trainer.phases.lease is not None
