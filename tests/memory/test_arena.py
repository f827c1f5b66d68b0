"""Tensors that sleep have a place each, as large as they are, in memory that is pinned once and kept."""

import io

import pytest
import torch

from verl_mux.memory import arena
from verl_mux.memory.arena import Arena, layout

KINDS = {
    "matrix": torch.randn(30, 70), "half": torch.randn(5).bfloat16(), "step": torch.tensor(3.0), "flag": torch.tensor(True),
    "none": torch.empty(0, 4), "turned": torch.randn(6, 4).t(), "wide": torch.randn(700).double(),
}  # fmt: skip


@pytest.fixture
def pinned(monkeypatch):
    """Bytes of each call that pins memory, where there is CUDA."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(arena, "pin", lambda address, nbytes, what: calls.append(nbytes))
    return calls


def addresses(copies):
    return {name: copy.data_ptr() for name, copy in copies.items()}


def test_tensors_of_any_kind_are_copied_bit_by_bit_and_keep_their_places(pinned):
    held = Arena("states")
    first = held.hold(KINDS)
    assert all(torch.equal(KINDS[name], copy) and copy.is_contiguous() for name, copy in first.items())
    other = {name: torch.ones_like(tensor) for name, tensor in KINDS.items()}
    assert addresses(held.hold(other)) == addresses(first) and len(pinned) == 1
    assert all(torch.equal(other[name], first[name]) for name in KINDS)


def test_a_place_has_the_bytes_of_its_tensor_and_less_than_512_more(pinned):
    tensors = {size: torch.zeros(size, dtype=torch.uint8) for size in (1, 511, 512, 513, 100_000, (1 << 20) + 1)}
    Arena("states").hold(tensors)
    assert sum(tensors) <= sum(pinned) <= sum(tensors) + 511 * len(tensors)
    assert (
        layout(tensors) == [0, 512, 1024, 1536, 2560, 102_912, 102_912 + (1 << 20) + 512] and sum(pinned) == layout(tensors)[-1]
    )


def test_what_lies_in_its_place_already_stays_there(pinned):
    held = Arena("states")
    copies = held.hold(KINDS)
    copies["matrix"].fill_(7)
    assert addresses(held.hold(copies)) == addresses(copies) and bool((copies["matrix"] == 7).all())


def test_new_tensors_and_larger_ones_get_memory_of_their_own_and_the_others_stay(pinned):
    held = Arena("states")
    first = held.hold({"a": torch.ones(4), "b": torch.ones(4)})
    second = held.hold({"a": torch.ones(4), "b": torch.full((300,), 2.0), "c": torch.ones(1)})
    assert pinned == [1024, 1536 + 512] and addresses(first)["a"] == addresses(second)["a"]
    assert bool((second["b"] == 2).all())
    third = held.hold({"b": torch.full((5,), 3.0)})
    assert third["b"].tolist() == [3.0] * 5 and third["b"].data_ptr() == second["b"].data_ptr() and len(pinned) == 2


def test_what_saves_a_tensor_saves_no_other_one():
    copies = Arena("states").hold({name: torch.randn(1000) for name in "abc"})
    torch.save(copies["b"], file := io.BytesIO())
    assert file.tell() < 6000


class Driver:
    def cudaHostRegister(self, address, nbytes, flags):
        return 2


def test_memory_that_cannot_be_pinned_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    with pytest.raises(RuntimeError, match=r"512 bytes of states on this host cannot be pinned \(CUDA error 2\)"):
        Arena("states").hold({"a": torch.ones(4)})
