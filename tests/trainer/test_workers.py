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
