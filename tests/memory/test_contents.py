"""What a model held before it slept, and what a sync must bring back."""

import pytest
import torch

from verl_mux.memory import arena
from verl_mux.memory.contents import Contents

NO_SYNC = "after a sleep without a copy no sync has brought back "


class Model(torch.nn.Module):
    """A large and a small parameter, one that is no float, a buffer, and two tensors that are mere attributes."""

    def __init__(self):
        super().__init__()
        self.large = torch.nn.Parameter(torch.randn(300, 400))
        self.small = torch.nn.Parameter(torch.randn(7))
        self.codes = torch.nn.Parameter(torch.arange(9), requires_grad=False)
        self.register_buffer("table", torch.randn(5))
        self.scale = torch.randn(3)
        self.view = self.large.data[0]


def lost(model):
    """As its memory comes back after a sleep: with anything in it."""
    for tensor in (model.large.data, model.small.data, model.scale):
        tensor.fill_(7.0)
    model.codes.data.fill_(7)


def slept(model):
    """Its contents after a sleep at level 2."""
    contents = Contents(model)
    contents.left(2)
    contents.came_back()
    return contents


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def test_level_1_brings_every_parameter_back(model):
    before, contents = {name: p.clone() for name, p in model.named_parameters()}, Contents(model)
    held = contents.left(1)
    assert held == sum(p.nbytes for p in model.parameters()) + model.scale.nbytes
    lost(model)
    contents.came_back()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert contents.lacks() is None


def test_slots_of_adapters_come_back_and_other_lists_of_tensors_are_not_looked_at(model):
    model.lora_a_stacked, model.kv_cache = (torch.randn(4), torch.randn(2)), [torch.randn(1000)]
    before, contents = [it.clone() for it in model.lora_a_stacked], Contents(model)
    assert contents.left(1) < 4000 + sum(p.nbytes for p in model.parameters())
    for slot in model.lora_a_stacked:
        slot.fill_(7.0)
    contents.came_back()
    assert all(map(torch.equal, before, model.lora_a_stacked))


def test_level_2_keeps_what_no_sync_sends_and_nothing_else(model):
    scale, codes, contents = model.scale.clone(), model.codes.clone(), Contents(model)
    assert contents.left(2) == model.scale.nbytes + model.codes.nbytes
    lost(model)
    contents.came_back()
    assert torch.equal(model.scale, scale) and torch.equal(model.codes, codes)
    assert contents.lacks() == NO_SYNC + "large, small"


@pytest.mark.parametrize("missing", range(0, 128, 9))
def test_a_part_that_a_loader_fills_by_itself_is_missed_however_small(missing):
    """One expert's half of a merged bias."""
    model = torch.nn.Module()
    model.bias = torch.nn.Parameter(torch.randn(128, 2 * 768))
    contents = slept(model)
    kept = model.bias.data[missing, 768:].clone()
    model.bias.data.zero_()
    model.bias.data[missing, 768:] = kept
    assert contents.lacks() == NO_SYNC + "bias"


def test_what_was_synced_in_part_is_named(model):
    contents = slept(model)
    model.small.data.copy_(torch.zeros(7))
    model.large.data[:250].copy_(torch.zeros(250, 400))
    assert contents.lacks() == NO_SYNC + "large"
    model.large.data[250:].copy_(torch.zeros(50, 400))
    assert contents.lacks() is None


@pytest.mark.parametrize("sent", ["nan", "-nan", "all bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_that_the_trainer_sent_is_no_weight_that_no_sync_brought_back(model, dtype, sent):
    """As computations on CPUs and GPUs leave them."""
    model = model.to(dtype)
    contents, bits = slept(model), torch.int32 if dtype == torch.float32 else torch.int16
    value = torch.full((1,), -1, dtype=bits).view(dtype) if sent == "all bits" else torch.tensor([float(sent)], dtype=dtype)
    model.large.data.copy_(value.expand(300, 400))
    assert contents.lacks() == NO_SYNC + "small"
    model.small.data.copy_(torch.zeros(7))
    assert contents.lacks() == "training has diverged: the trainer's own weights hold NaN, in large"
    model.large.data.copy_(torch.zeros(300, 400))
    assert contents.lacks() is None


def test_a_model_that_sleeps_before_its_sync_has_nothing_to_keep(model):
    contents = slept(model)
    assert contents.left(1) == model.scale.nbytes + model.codes.nbytes
    contents.came_back()
    assert contents.lacks() == NO_SYNC + "large, small"


def test_a_whole_model_leaves_no_copies_behind(model):
    contents = Contents(model)
    contents.left(1)
    contents.settled()
    lost(model)
    contents.came_back()
    assert bool((model.large == 7.0).all())


def test_copies_of_any_type_and_shape_come_back():
    model = torch.nn.Module()
    kinds = [torch.randn(3, 5).bfloat16(), torch.tensor(True), torch.empty(0, 4), torch.randn(7).double()]
    for number, values in enumerate(kinds):
        model.register_parameter(f"kind{number}", torch.nn.Parameter(values, requires_grad=False))
    model.turned = torch.nn.Parameter(torch.randn(6, 4).t())
    before, contents = {name: p.clone() for name, p in model.named_parameters()}, Contents(model)
    contents.left(1)
    for parameter in model.parameters():
        parameter.data.zero_()
    contents.came_back()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


class OnDevice(torch.Tensor):
    """One that says that it lies on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


def test_from_a_device_the_copies_go_with_one_wait_into_memory_that_is_pinned_once_and_kept(monkeypatch):
    """What torch does with a GPU is written down in order; the bytes move all the same."""
    calls, copy_ = [], torch.Tensor.copy_
    model = torch.nn.Module()
    model.scale, model.table = (torch.ones(4).as_subclass(OnDevice), torch.ones(9).as_subclass(OnDevice))

    def copied(to, of, non_blocking=False):
        calls.append(("copy", of.numel(), non_blocking))
        return copy_(to, of.as_subclass(torch.Tensor))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(arena, "pin", lambda address, nbytes, what: calls.append(("pinned", nbytes)))
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    contents, moved = Contents(model), [("copy", 4, True), ("copy", 9, True), "synchronize"]
    assert contents.left(2) == 13 * 4
    assert calls == [("pinned", 1024), *moved]
    contents.settled()
    calls.clear()
    assert contents.left(1) == 13 * 4
    assert calls == moved
