"""verl's own calls for Megatron find a place for each state in the arena: they pin nothing, and all comes back as it was."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("megatron.core")
from verl.utils import megatron_utils

from verl_mux.memory.arena import Arena
from verl_mux.trainer.megatron_states import give_places


class Stage(torch.nn.Module):
    """Megatron's DDP around a stage: flat buffers. `cpu_data` of a buffer's parameters is verl's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(1, 1)
        made = [SimpleNamespace(param_data=torch.randn(size).bfloat16(), grad_data=torch.zeros(size)) for size in (300, 40)]
        vars(self).update(buffers=made[:1], expert_parallel_buffers=made[1:])


def optimizer(*sizes):
    """Of parts that it trains in fp32, with what Adam keeps of each."""
    mains = [torch.randn(size) for size in sizes]
    kept = {at: {"exp_avg": torch.randn(size), "exp_avg_sq": torch.rand(size), "step": 3} for at, size in enumerate(sizes)}
    return SimpleNamespace(shard_fp32_from_float16_groups=[mains[:1], [*mains[1:], None]], optimizer=SimpleNamespace(state=kept))


def test_each_state_has_its_bytes_in_the_arena_and_verl_pins_none(monkeypatch):
    device = SimpleNamespace(empty_cache=lambda: None)
    monkeypatch.setattr(megatron_utils, "DDP", Stage)
    monkeypatch.setattr(megatron_utils, "get_torch_device", lambda: device)
    monkeypatch.setattr(megatron_utils, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(megatron_utils, "get_global_memory_buffer", lambda: SimpleNamespace(buffer={}))
    empty = torch.empty

    def pageable(*size, pin_memory=False, **how):
        assert not pin_memory
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", pageable)
    stages, both, arena = [Stage()], SimpleNamespace(chained_optimizers=[optimizer(70, 9), optimizer(33, 5)]), Arena("states")
    buffers = [*stages[0].buffers, *stages[0].expert_parallel_buffers]

    def parts():
        for one in both.chained_optimizers:
            yield from (it for group in one.shard_fp32_from_float16_groups for it in group if it is not None)
            yield from (value for kept in one.optimizer.state.values() for value in kept.values() if value is not kept["step"])

    before = [it.clone() for it in (*(it.param_data for it in buffers), *parts())]
    places = set()
    for _ in range(2):
        give_places(stages, both, arena)
        megatron_utils.offload_megatron_model_to_cpu(stages)
        for one in both.chained_optimizers:
            megatron_utils.offload_megatron_optimizer(one)
        assert all(it.param_data.untyped_storage().nbytes() == 0 for it in buffers)
        held = [*(it.param_data.cpu_data for it in buffers), *parts()]
        assert all(torch.equal(one, other) for one, other in zip(before, held, strict=True))
        places.add(tuple(it.data_ptr() for it in held))
        megatron_utils.load_megatron_model_to_gpu(stages)
        for one in both.chained_optimizers:  # to the device, where another tensor is made
            for kept in one.optimizer.state.values():
                kept |= {key: value.clone() for key, value in kept.items() if key != "step"}
        assert all(torch.equal(one, it.param_data) for one, it in zip(before, buffers, strict=False))
    assert len(places) == 1 and sum(it.nbytes for it in before) <= sum(it.nbytes for it in arena._places.values())
