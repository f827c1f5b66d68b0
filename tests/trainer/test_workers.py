"""A training worker's states leave the device and come back, on a machine whose device is the host's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

pytest.importorskip("verl")
from verl.workers.engine.base import BaseEngineCtx

from verl_mux.trainer import workers
from verl_mux.trainer.workers import DeviceStates, host_copy
from verl_mux_cpu import cpu_saver
from verl_mux_cpu.cpu_saver import CpuMemorySaver

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


@pytest.fixture
def on_cuda(cuda):
    def made(**config):
        engine = cuda.engine(**config)
        return cuda.calls, engine, DeviceStates("actor", engine)

    return made


def call(engine, mode):
    """As verl's workers do for each forward pass and each update."""
    with BaseEngineCtx(engine, mode):
        engine.worked = mode


def test_on_cuda_the_copies_are_complete_before_the_device_is_said_to_be_free(on_cuda):
    calls, _, states = on_cuda()
    assert figures(states.sleep()) == {"params": (100, 0)}
    assert calls == [("cpu", True, True), "synchronize", "empty_cache", "empty_host_cache"]


def test_on_cuda_a_phase_loads_and_offloads_its_states_once_however_many_calls_it_has(on_cuda):
    calls, engine, states = on_cuda()
    states.sleep()
    calls.clear()
    assert figures(states.wake()) == {"params": (100, 100)}
    for mode in ("eval", "eval", "train"):
        call(engine, mode)
    assert calls == [("cuda", True, True), "synchronize"]
    states.sleep()
    assert calls[2:] == [("cpu", True, True), "synchronize", "empty_cache", "empty_host_cache"]


def test_on_cuda_a_call_outside_of_a_phase_moves_its_states_itself(on_cuda):
    calls, engine, states = on_cuda()
    states.sleep()
    calls.clear()
    call(engine, "train")
    assert calls == [("cuda", True, True), ("cpu", True, True)]


@pytest.mark.parametrize("config", [{"forward_only": True}, {"offload_policy": True}])
def test_what_fsdp_moves_by_itself_is_left_to_it(on_cuda, config):
    calls, engine, states = on_cuda(**config)
    states.sleep()
    states.wake()
    calls.clear()
    call(engine, "eval")
    states.sleep()
    call(engine, "eval")
    assert calls.count(("cuda", True, False)) == 0 and not engine.is_param_offload_enabled


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
        return [workers._local(tensor.detach()).clone() for tensor in (*self.module.parameters(), *moments)]


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


def test_what_is_exported_on_the_device_is_in_the_type_of_the_engines():
    weights = [("w", torch.ones(2, dtype=torch.float32)), ("n", torch.ones(2, dtype=torch.int64))]
    cast = dict(workers._cast(weights, torch.bfloat16))
    assert cast["w"].dtype == torch.bfloat16 and cast["n"].dtype == torch.int64
