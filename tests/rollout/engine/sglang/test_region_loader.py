"""What an engine's process loads from the region of its host, with a model and, where it says so, a driver that stand in."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch

pytest.importorskip("sglang")
from verl_mux.rollout.engine.sglang import region_loader
from verl_mux.rollout.engine.sglang.region_loader import Mapped, Place
from verl_mux.sync.export import as_bytes
from verl_mux.sync.layout import Entry, Layout, Region

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


class Model:
    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.addresses: list[int] = []

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.addresses.append(tensor.data_ptr())
            self.loaded[name] = tensor.clone()


@pytest.fixture
def mapping(monkeypatch):
    """Of an engine's first rank."""
    parallel = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", parallel)
    monkeypatch.setattr(region_loader, "_mapping", region_loader._Mapping())
    return region_loader._mapping


@pytest.fixture
def region():
    made = [_region(WEIGHTS)]
    yield made
    for each in made:
        each.close()


def _region(weights) -> Region:
    layout = _layout(weights)
    region = Region.made(layout.nbytes)
    for tensor, offset in zip(weights.values(), layout.offsets, strict=True):
        region.view[offset : offset + tensor.nbytes] = as_bytes(tensor)
    return region


def _layout(weights) -> Layout:
    return Layout([Entry(name, str(it.dtype).removeprefix("torch."), tuple(it.shape), it.nbytes) for name, it in weights.items()])


def _load(region: Region, weights=WEIGHTS, **place) -> Model:
    layout, model = _layout(weights), Model()
    at = Place(**{"pid": os.getpid(), "fd": region.fd, "nbytes": region.nbytes, **place})
    told = msgspec.json.encode(Mapped([at], layout.entries, layout.offsets)).decode()
    region_loader.load(model, [(told, torch.zeros(0))])
    return model


def test_a_model_loads_tensors_that_lie_in_the_region(mapping, region):
    model = _load(region[0])
    assert all(model.loaded[name].equal(tensor) and model.loaded[name].dtype == tensor.dtype for name, tensor in WEIGHTS.items())
    start = torch.frombuffer(mapping._region.view, dtype=torch.uint8).data_ptr()
    assert all(start <= address < start + region[0].nbytes for address in model.addresses), "a copy was made on the way"


def test_the_next_sync_finds_the_memory_mapped_and_what_is_new_in_it(mapping, region):
    _load(region[0])
    mapped = mapping._region
    region[0].view[:4] = as_bytes(torch.tensor([7.0]))
    assert _load(region[0]).loaded["a"][0, 0] == 7.0 and mapping._region is mapped
    larger = {**WEIGHTS, "c": torch.zeros(100)}
    region.append(_region(larger))
    assert _load(region[1], larger).loaded["c"].equal(larger["c"]) and mapping._region is not mapped


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"fd": 9999}, "cannot be mapped: No such file"),
        ({"pid": 2**22}, "cannot be mapped"),
        ({"nbytes": 1 << 30}, "is no memory"),
    ],
)
def test_what_is_no_such_memory_is_named(mapping, region, place, said):
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match=said):
        _load(region[0], **place)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_another_open_file_is_not_mapped(mapping, region, tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(region[0].nbytes)
        with pytest.raises(RuntimeError, match="is no memory of .* bytes of weights"):
            _load(region[0], fd=file.fileno())
    assert mapping._region is None


class Driver:
    """CUDA's calls that pin memory."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.pinned, self.calls = code, {}, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address not in self.pinned and flags == 0
        self.calls.append("register")
        if not self.code:
            self.pinned[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        del self.pinned[address]
        return 0


def test_the_region_is_pinned_once_and_no_longer_when_another_takes_its_place(mapping, region, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    _load(region[0])
    _load(region[0])
    assert driver.calls == ["register"] and list(driver.pinned.values()) == [region[0].nbytes]
    larger = {**WEIGHTS, "c": torch.zeros(100)}
    region.append(_region(larger))
    _load(region[1], larger)
    assert driver.calls == ["register", "unregister", "register"] and list(driver.pinned.values()) == [region[1].nbytes]


def test_memory_that_cannot_be_pinned_is_named(mapping, region, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(2))
    with pytest.raises(RuntimeError, match=r"cannot be pinned \(CUDA error 2\)"):
        _load(region[0])
