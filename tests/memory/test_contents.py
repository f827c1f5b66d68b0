"""What a model held before it slept, and what a sync must bring back."""

import pytest
import torch

from verl_mux.memory.contents import Contents


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
    assert contents.unsynced() == []


def test_level_2_keeps_what_no_sync_sends_and_nothing_else(model):
    scale, codes, contents = model.scale.clone(), model.codes.clone(), Contents(model)
    assert contents.left(2) == model.scale.nbytes + model.codes.nbytes
    lost(model)
    contents.came_back()
    assert torch.equal(model.scale, scale) and torch.equal(model.codes, codes)
    assert contents.unsynced() == ["large", "small"]


@pytest.mark.parametrize("missing", range(0, 128, 9))
def test_a_part_that_a_loader_fills_by_itself_is_missed_however_small(missing):
    """One expert's half of a merged bias."""
    model = torch.nn.Module()
    model.bias = torch.nn.Parameter(torch.randn(128, 2 * 768))
    contents = Contents(model)
    contents.left(2)
    contents.came_back()
    kept = model.bias.data[missing, 768:].clone()
    model.bias.data.zero_()
    model.bias.data[missing, 768:] = kept
    assert contents.unsynced() == ["bias"]


def test_what_was_synced_in_part_is_named(model):
    contents = Contents(model)
    contents.left(2)
    contents.came_back()
    model.small.data.copy_(torch.zeros(7))
    model.large.data[:250].copy_(torch.zeros(250, 400))
    assert contents.unsynced() == ["large"]
    model.large.data[250:].copy_(torch.zeros(50, 400))
    assert contents.unsynced() == []


def test_a_model_that_sleeps_before_its_sync_has_nothing_to_keep(model):
    contents = Contents(model)
    contents.left(2)
    contents.came_back()
    assert contents.left(1) == model.scale.nbytes + model.codes.nbytes
    contents.came_back()
    assert contents.unsynced() == ["large", "small"]


def test_a_whole_model_leaves_no_copies_behind(model):
    contents = Contents(model)
    contents.left(1)
    contents.settled()
    lost(model)
    contents.came_back()
    assert bool((model.large == 7.0).all())
