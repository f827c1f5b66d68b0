"""A training worker's states leave the device and come back, on a machine whose device is the host's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")
from verl_mux.memory.cpu_saver import CpuMemorySaver
from verl_mux.trainer import workers
from verl_mux.trainer.workers import DeviceStates, host_copy

WIDTH = 64


@pytest.fixture
def made(monkeypatch):
    """Makes the states of an engine in a role, with an optimizer that has stepped once or without one."""
    monkeypatch.setattr(workers, "cpu_memory_saver", CpuMemorySaver())
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


class Recorder:
    """A device module or an engine of verl's that writes down what was called, in order."""

    def __init__(self, calls, prefix=""):
        self._calls, self._prefix = calls, prefix

    def memory_allocated(self):
        return 100 - 10 * len(self._calls)

    def __getattr__(self, name):
        def call(*arguments, **keys):
            self._calls.append((f"{self._prefix}{name}", *arguments, *sorted(keys.items())))

        return call


@pytest.fixture
def on_cuda(monkeypatch):
    """What is called of the device and of the engine of a role, on a platform that says it is CUDA."""
    calls = []
    monkeypatch.setattr(workers, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(workers, "get_torch_device", lambda: Recorder(calls))
    return calls, DeviceStates("actor", Recorder(calls, "engine."))


def test_on_cuda_the_copies_are_complete_before_the_device_is_said_to_be_free(on_cuda):
    calls, states = on_cuda
    moved = states.sleep()["params"]
    offload = ("engine.to", "cpu", ("grad", True), ("model", True), ("optimizer", True))
    assert calls == [offload, ("synchronize",), ("empty_cache",)]
    assert moved.nbytes == 30
    assert states.wake() == {} and len(calls) == 3


def test_what_is_exported_on_the_device_is_in_the_type_of_the_engines():
    weights = [("w", torch.ones(2, dtype=torch.float32)), ("n", torch.ones(2, dtype=torch.int64))]
    cast = dict(workers._cast(weights, torch.bfloat16))
    assert cast["w"].dtype == torch.bfloat16 and cast["n"].dtype == torch.int64
