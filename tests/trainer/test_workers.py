"""A training worker's states leave the device and come back: on a machine whose device is the host's memory, and where the
platform says that the device is CUDA, with stand-ins of it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch.distributed.fsdp import fully_shard

pytest.importorskip("verl")
from verl.workers.engine import base
from verl.workers.engine.base import BaseEngineCtx
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from tests.trainer.fencing import Fencing, bare_trainer
from verl_mux.coordinator.bus.fence import Fence, Fenced
from verl_mux.errors import Failure
from verl_mux.memory.arena import Arena
from verl_mux.memory.room import Residents
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.trainer import fsdp_states, workers
from verl_mux.trainer.fsdp_states import local
from verl_mux.trainer.phases import Phases
from verl_mux.trainer.workers import DeviceStates, MuxActorWorker, MuxTrainingWorker, host_copy
from verl_mux_cpu import cpu_saver
from verl_mux_cpu.cpu_saver import CpuMemorySaver


class Cuda:
    """A device module, of whose `size` bytes this process has `held`, and engines. `calls`: what was called of these, in order.
    `bytes_each`: of an engine's states."""

    def __init__(self):
        self.calls, self.bytes_each, self.held, self.size = [], 100, 0, 1 << 40
        self.synchronize, self.empty_cache = (partial(self.calls.append, name) for name in ("synchronize", "empty_cache"))
        self.memory_allocated, self.list_gpu_processes = lambda: self.held, lambda: "process 7 uses 9 MB"

    def mem_get_info(self):
        self.calls.append("mem_get_info")
        return self.size - self.held, self.size

    def engine(self, role=None, **config):
        """One of verl's, whose states lie on the device. Its calls are noted with its role, or with what of it was moved."""
        cuda = self

        class Engine(FSDPEngine):
            def __init__(self):
                self.module = torch.nn.Linear(2, 2)
                policy = {"strategy": "fsdp2", "forward_only": False, "offload_policy": False}
                self.engine_config = SimpleNamespace(**{**policy, **config})
                self._is_offload_param = self._is_offload_optimizer = not any(config.values())
                self.here = False
                self.place(True)

            def place(self, here):
                cuda.held += cuda.bytes_each * (here - self.here)
                self.here = here

            def to(self, device, model=True, optimizer=True, grad=True):
                if model or optimizer:
                    cuda.calls.append((role, device) if role else (device, model, optimizer))
                    self.place(device != "cpu")

        return Engine()


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    for where in (workers, base):
        monkeypatch.setattr(where, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(workers, "get_torch_device", lambda: made)
    assert callable(torch._C._host_emptyCache)
    monkeypatch.setattr(workers, "_empty_host_cache", lambda: made.calls.append("empty_host_cache"))
    return made


WIDTH = 64


@pytest.fixture
def made(monkeypatch):
    """Makes the states of an engine in a role, with an optimizer that has stepped once or without one."""
    monkeypatch.setattr(cpu_saver, "cpu_memory_saver", CpuMemorySaver())
    monkeypatch.setattr(workers, "get_device_name", lambda: "cpu")

    def states(role: str, trains: bool = True) -> tuple[DeviceStates, torch.nn.Module]:
        module = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        engine = SimpleNamespace(module=module)
        if trains:
            engine.optimizer = torch.optim.Adam(module.parameters())
            module(torch.ones(1, WIDTH)).sum().backward()
            engine.optimizer.step()
        return DeviceStates(role, engine), module

    return states


def figures(moves) -> dict[str, tuple[int, int]]:
    return {tag: (moved.nbytes, moved.mapped) for tag, moved in moves.items()}


def test_they_leave_once_and_come_back_as_they_were(made):
    states, module = made("actor")
    before, size = module.weight.detach().clone(), module.weight.nbytes
    asleep = figures(states.sleep())
    assert asleep["params"] == (size, 0) and asleep["optimizer"][0] >= 2 * size and asleep["optimizer"][1] == 0
    assert states.sleep() == {}
    assert host_copy(module.weight.detach()).equal(before)
    awake = figures(states.wake())
    assert awake["params"] == (size, size) and awake["optimizer"][0] == asleep["optimizer"][0]
    assert states.wake() == {} and module.weight.equal(before)


def test_roles_of_one_process_sleep_and_wake_each_by_itself(made):
    (actor, model), (reference, other) = made("actor"), made("ref", trains=False)
    actor.sleep()
    assert figures(reference.sleep()) == {"params": (other.weight.nbytes, 0), "optimizer": (0, 0)}
    actor.wake()
    assert reference.sleep() == {} and set(reference.wake()) == {"params", "optimizer"}
    assert model.weight.isfinite().all()


class Stage(torch.nn.Module):
    """As Megatron's, of a pipeline: parameters lie in one flat buffer, gradients in another, under the name of torch's method."""

    def __init__(self):
        super().__init__()
        flat = torch.randn(WIDTH * WIDTH)
        self.weight = torch.nn.Parameter(flat.view(WIDTH, WIDTH))
        self.buffers, self.expert_parallel_buffers = [SimpleNamespace(grad_data=torch.ones(WIDTH * WIDTH))], []


def test_megatrons_states_leave_too_and_its_gradients_without_a_copy(made):
    made("actor")
    stage = Stage()
    trained = stage.weight.detach().clone().requires_grad_()
    inner = torch.optim.Adam([trained])
    trained.sum().backward()
    inner.step()
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
    states = DeviceStates("actor", SimpleNamespace(module=[stage], optimizer=optimizer))
    before, size = (stage.weight.detach().clone(), trained.detach().clone()), trained.nbytes
    asleep = figures(states.sleep())
    assert asleep["params"] == asleep["gradients"] == (size, 0) and asleep["optimizer"][0] >= 3 * size
    with pytest.raises(ValueError, match="no host copy"):
        host_copy(stage.buffers[0].grad_data)
    assert set(states.wake()) == {"params", "optimizer", "gradients"}
    assert stage.weight.equal(before[0]) and trained.equal(before[1])


def on(cuda, **config):
    engine = cuda.engine(**config)
    return cuda.calls, engine, DeviceStates("actor", engine)


def call(engine, mode):
    """As verl's workers do for each forward pass and each update."""
    with BaseEngineCtx(engine, mode):
        engine.worked = mode


def test_on_cuda_a_phase_loads_and_offloads_its_states_once_however_many_calls_it_has(cuda):
    calls, engine, states = on(cuda)
    assert figures(states.sleep()) == {"params": (100, 0)}
    # The copies are complete before the device is said to be free.
    assert calls == [("cpu", True, True), *LEAVES]
    calls.clear()
    assert figures(states.wake()) == {"params": (100, 100)}
    for mode in ("eval", "eval", "train"):
        call(engine, mode)
    assert calls == [("cuda", True, True), "synchronize"]
    states.sleep()
    assert calls[2:] == [("cpu", True, True), *LEAVES]
    # A call outside of a phase moves its states itself.
    calls.clear()
    call(engine, "train")
    assert calls == [("cuda", True, True), ("cpu", True, True)]


@pytest.mark.parametrize("config", [{"forward_only": True}, {"offload_policy": True}])
def test_what_fsdp_moves_by_itself_is_left_to_it(cuda, config):
    calls, engine, states = on(cuda, **config)
    states.sleep()
    states.wake()
    calls.clear()
    call(engine, "eval")
    states.sleep()
    call(engine, "eval")
    assert calls.count(("cuda", True, False)) == 0 and not engine.is_param_offload_enabled


def test_megatrons_frozen_models_are_moved_once_too(cuda):
    calls, engine, states = on(cuda, forward_only=True)
    del engine.engine_config.offload_policy
    states.sleep()
    states.wake()
    calls.clear()
    call(engine, "eval")
    assert calls == [] and not engine.is_param_offload_enabled


class Twin:
    """A model with dropout over a mesh of one rank, and its optimizer; each draws from a random state of its own."""

    def __init__(self, mesh):
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5), torch.nn.Linear(WIDTH, 1))
        fully_shard(self.module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.random = torch.get_rng_state()

    def step(self):
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def look(self):
        """As a reference, which is never trained."""
        with torch.no_grad():
            return self.forward().item()

    def forward(self):
        torch.set_rng_state(self.random)
        loss = self.module(torch.ones(4, WIDTH)).square().sum()
        self.random = torch.get_rng_state()
        return loss

    def whole(self):
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [local(tensor.detach()).clone() for tensor in (*self.module.parameters(), *moments)]


def test_a_job_that_was_suspended_is_what_it_was_and_its_next_step_is_that_of_one_that_was_not(one_rank_mesh, monkeypatch):
    monkeypatch.setattr(cpu_saver, "cpu_memory_saver", CpuMemorySaver())
    monkeypatch.setattr(workers, "get_device_name", lambda: "cpu")
    roles = ("actor", "ref", "critic")
    stays, leaves = ({role: Twin(one_rank_mesh) for role in roles} for _ in range(2))
    states = {role: DeviceStates(role, twin) for role, twin in leaves.items()}
    for _ in range(3):
        for role in ("actor", "critic"):
            assert stays[role].step() == leaves[role].step()
        assert stays["ref"].look() == leaves["ref"].look()
        before = {role: twin.whole() for role, twin in leaves.items()}
        for asleep in states.values():
            asleep.sleep()
        assert sum(cpu_saver.cpu_memory_saver.mapped_bytes().values()) == 0
        for awake in states.values():
            awake.wake()
        for role in roles:
            for one, other, third in zip(before[role], leaves[role].whole(), stays[role].whole(), strict=True):
                assert one.equal(other) and one.equal(third)
            assert stays[role].random.equal(leaves[role].random)


def test_each_export_lies_in_the_same_memory_in_the_type_of_the_engines(monkeypatch):
    full = {"w": torch.randn(5, 4), "n": torch.arange(3)}
    worker = object.__new__(MuxActorWorker)
    worker._rank, worker._world_size, worker._arena = 1, 2, Arena("exported weights", 1 << 16)
    worker.config = OmegaConf.create({"rollout": {"dtype": "bfloat16"}})
    engine = SimpleNamespace(module=torch.nn.Linear(1, 1), get_per_tensor_param=lambda **_: (iter(full.items()), None))
    engine.engine_config = SimpleNamespace(strategy="megatron")
    worker.actor = SimpleNamespace(engine=engine)
    monkeypatch.setattr(workers, "get_device_name", lambda: "cpu")
    places = set()
    for _ in range(2):
        worker._export()
        half, whole = worker._exported
        assert torch.equal(half.data, full["w"].bfloat16().view(-1)[8:]) and torch.equal(whole.data, full["n"][2:])
        places.add((half.data.data_ptr(), whole.data.data_ptr()))
        full["w"].add_(1)
    assert len(places) == 1 and len({it // (1 << 16) for it in places.pop()}) <= 2


# ---------------------------------------------------------------- what a process calls of a CUDA device and of verl's engines


# Of an engine that leaves, and of one that comes back.
LEAVES = ["synchronize", "empty_cache", "empty_host_cache"]
LOOKS = ["empty_cache", "mem_get_info"]


@pytest.fixture
def process(cuda, monkeypatch):
    """A training process: the worker of actor and reference, and the critic's, which have just started."""
    residents = Residents()
    monkeypatch.setattr(workers, "residents", residents)
    monkeypatch.setattr(workers, "are_row_shards", lambda module, quantized: not quantized)  # they are sent from the host copy
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


def test_what_a_veomni_engine_sends_is_exported_on_the_device_in_its_ranks_part(cuda, process):
    engine, actor = process.actor.actor.engine, process.actor
    engine.engine_config.strategy, engine.get_per_tensor_param = "veomni", lambda **_: ([("w", torch.ones(64))], None)
    actor._rank, actor._world_size, actor.config = 1, 2, OmegaConf.create({"rollout": {"dtype": "bfloat16"}})
    actor._arena = Arena("exported weights", 1 << 16)
    assert actor.mux_sleep()["exported"].nbytes == 64
    (part,) = actor._exported
    assert (part.name, part.dtype, part.offset, part.nbytes) == ("w", torch.bfloat16, 64, 64)
    actor.mux_wake(1)
    assert actor._exported is None


@pytest.mark.parametrize("which", range(3))
def test_a_process_whose_states_did_not_leave_gives_no_lease_back(cuda, process, which):
    cuda.bytes_each, cuda.held = 10**9, 3 * 10**9
    process.engines[which].place = lambda here: None
    with pytest.raises(Failure, match="1.00 of 3.00 GB did not leave the device"):
        left(process)


def test_all_engines_leave_before_the_process_says_what_it_holds_and_room_is_looked_for_before_any_is_mapped(cuda, process):
    assert left(process) == [0, 0] and cuda.held == 0
    assert cuda.calls == [("actor", "cpu"), *LEAVES, ("ref", "cpu"), *LEAVES, ("critic", "cpu"), *LEAVES]
    cuda.calls.clear()
    assert sum(moved.mapped for moved in process.actor.mux_wake(1).values()) == 200
    process.critic.mux_wake(1)
    awake = [(*LOOKS, (role, "cuda"), "synchronize") for role in ("actor", "critic")]
    assert cuda.calls == [*awake[0], ("ref", "cuda"), "synchronize", *awake[1]]


def test_a_wake_without_room_maps_nothing_and_names_the_holders(cuda, process):
    left(process)
    cuda.calls.clear()
    cuda.size = 100  # of actor and reference only one would fit
    with pytest.raises(Failure, match="no room to wake: the actor's states take .* held by process 7 uses 9 MB"):
        process.actor.mux_wake(1)
    assert cuda.calls == LOOKS and cuda.held == 0


def test_room_that_goes_while_the_actor_wakes_takes_back_what_was_mapped(cuda, process):
    left(process)

    def full(*_, **__):
        process.actor.ref.engine.to = lambda *_, **__: None
        raise torch.OutOfMemoryError("CUDA out of memory")

    process.actor.ref.engine.to = full
    with pytest.raises(Failure, match="no room to wake the actor's states: CUDA out of memory"):
        process.actor.mux_wake(1)
    assert cuda.held == 0


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


def engine(optimizer, **config):
    """One of verl's that went through no set-up."""
    made = object.__new__(FSDPEngine)
    made.engine_config = SimpleNamespace(**{"strategy": "fsdp2", "forward_only": False, "offload_policy": False, **config})
    made.module, made.optimizer = torch.nn.Linear(2, 2), optimizer
    made._is_offload_param = made._is_offload_optimizer = not made.engine_config.forward_only
    return made


_OURS = ("offload_model", "offload_optimizer")


@pytest.mark.parametrize(
    ("optimizer", "config", "moved"),
    [(object(), {}, True), (None, {"forward_only": True}, False)],
)
def test_verls_engine_moves_all_of_a_trained_model_once_and_leaves_a_frozen_one_to_fsdp(
    cuda, monkeypatch, optimizer, config, moved
):
    awake = ["load_fsdp_model_to_gpu", "load_fsdp_optimizer"] if moved else []
    asleep = ["offload_model", "offload_optimizer"] if moved else []
    states, called = workers.DeviceStates("critic", engine(optimizer, **config)), []
    for module in (transformer_impl, fsdp_states):
        monkeypatch.setattr(module, "get_device_name", lambda: "cuda")
    for module, names in ((transformer_impl, ("load_fsdp_model_to_gpu", "load_fsdp_optimizer")), (fsdp_states, _OURS)):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, name=name: called.append(name))
    for name in ("offload_fsdp_model_to_cpu", "offload_fsdp_optimizer"):
        monkeypatch.setattr(transformer_impl, name, None)
    fsdp_states.take_over()
    states.wake()
    assert called == awake
    states.sleep()
    assert called == awake + asleep
    assert cuda.calls == ["synchronize", *LEAVES]


# ---------------------------------------------------------------- the whole order


class Lease(Fencing):
    """Leases that are noted among the device's calls."""

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
    made = bare_trainer(curr_step_profile=False, timing_raw={})
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
