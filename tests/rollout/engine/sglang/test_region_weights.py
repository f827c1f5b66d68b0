"""The workers of one engine go through a sync's batches together; the group between them, and the engine, stand in."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
from types import SimpleNamespace

import msgspec
import pytest
import torch

pytest.importorskip("sglang")
from verl_mux.rollout.engine import region_weights
from verl_mux.rollout.engine.region_weights import Mapped, Place
from verl_mux.rollout.engine.sglang import scheduler_lora, sglang_weights
from verl_mux.rollout.engine.sglang.sglang_weights import LOADER
from verl_mux.sync.engine import Batch
from verl_mux.sync.export import as_bytes
from verl_mux.sync.layout import Entry, Layout, Region, SyncError

LAYOUT = Layout([Entry(name, "float32", (2,), 8) for name in "abc"])
WITHIN_S = 30


class Group:
    """Exchanges among so many threads, each a rank of an engine."""

    def __init__(self, ranks: int) -> None:
        self._together = threading.Barrier(ranks)
        self._said: dict[int, object] = {}

    def gather(self, rank: int, said: object) -> list:
        self._said[rank] = said
        self._together.wait(WITHIN_S)
        mapped = [self._said[at] for at in sorted(self._said)]
        self._together.wait(WITHIN_S)
        return mapped


class Engine:
    def __init__(self, fails: bool = False) -> None:
        self.asked, self.flushed, self.fails = [], 0, fails

    async def _make_async_request(self, endpoint, fields, timeout) -> None:
        assert endpoint == "update_weights_from_tensor" and timeout > 60  # it may pin hundreds of GB
        (asked,) = map(base64.b64decode, fields["serialized_named_tensors"])
        if self.fails:
            raise ValueError("the engine is gone")
        self.asked.append(json.loads(asked))

    async def flush_cache(self) -> None:
        self.flushed += 1


class Rank:
    """`engine`: of the first one. `fails_at`: before which batch the sync fails here."""

    def __init__(self, engine: Engine | None, fails_at: int | None = None) -> None:
        self._engine, self._fails_at = engine, fails_at
        self.versions: list[int] = []
        self.device_mesh = {"infer_tp": SimpleNamespace(get_group=lambda: self)}  # stands for its group
        self.server_actor = SimpleNamespace(set_global_steps=SimpleNamespace(remote=self._set))
        self.error: Exception | None = None
        self.closed = False

    async def _init_server_adapter(self) -> None:
        pass

    async def _set(self, version: int) -> None:
        self.versions.append(version)

    async def batches(self, fd: int):
        try:
            for at in range(3):
                if at == self._fails_at:
                    raise SyncError("trainer rank 0 is lost")
                yield Batch(LAYOUT, SimpleNamespace(fd=fd, nbytes=LAYOUT.nbytes), at, at + 1)
        finally:
            self.closed = True


def asked_for(batch: Batch, places: list[Place]) -> SimpleNamespace:
    body = json.dumps([batch.first, [place.fd for place in places]]).encode()
    return SimpleNamespace(serialized_named_tensors=[body], load_format=LOADER, flush_cache=False)


def loaded(monkeypatch, ranks: list[Rank]) -> list[Rank]:
    """All of them have gone through a sync, or failed."""
    group = Group(len(ranks))

    class Ranks(region_weights._Ranks):
        def __init__(self, rank) -> None:
            self._rank, self._left = ranks.index(rank), False

        def _gather(self, said):
            return group.gather(self._rank, said)

    monkeypatch.setattr(region_weights, "_Ranks", Ranks)
    monkeypatch.setattr(sglang_weights, "request", lambda batch, places: asked_for(batch, places))

    def run(at: int) -> None:
        try:
            asyncio.run(sglang_weights.load(ranks[at], ranks[at].batches(at), 7, None))
        except Exception as error:
            ranks[at].error = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WITHIN_S)
        assert not thread.is_alive()
    assert all(rank.closed for rank in ranks)
    return ranks


def test_the_first_rank_asks_for_each_batch_with_every_ranks_memory_and_says_the_version(monkeypatch):
    first, second = loaded(monkeypatch, [Rank(Engine()), Rank(None)])
    assert first._engine.asked == [[0, [0, 1]], [1, [0, 1]], [2, [0, 1]]]
    assert (first._engine.flushed, first.versions, second.versions, first.error, second.error) == (1, [7], [], None, None)


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1, 2}], ids=["first", "second", "all"])
@pytest.mark.parametrize("at", [0, 2])
def test_who_fails_tells_the_others_and_nobody_waits_or_serves(monkeypatch, failing, at):
    ranks = loaded(monkeypatch, [Rank(Engine() if rank == 0 else None, at if rank in failing else None) for rank in range(3)])
    for rank in ranks:
        assert isinstance(rank.error, SyncError) and "trainer rank 0 is lost" in str(rank.error)
        assert rank.versions == []
    assert ranks[0]._engine.flushed == 0 and len(ranks[0]._engine.asked) == at


def test_an_engine_that_does_not_load_is_heard_by_all_ranks(monkeypatch):
    first, second = loaded(monkeypatch, [Rank(Engine(fails=True)), Rank(None)])
    assert isinstance(first.error, ValueError)
    assert str(second.error) == "another worker of this engine failed: ValueError: the engine is gone"


def test_a_request_is_what_sglang_reads(monkeypatch):
    from sglang.srt.utils import MultiprocessingSerializer

    place = Place(os.getpid(), 5, LAYOUT.nbytes)
    asked = sglang_weights.request(Batch(LAYOUT, None, 1, 3), [place, place])
    assert (asked.load_format, asked.flush_cache, len(asked.serialized_named_tensors)) == (LOADER, False, 2)
    ((mapped, tensor),) = MultiprocessingSerializer.deserialize(asked.serialized_named_tensors[1])
    assert msgspec.json.decode(mapped, type=Mapped) == Mapped([place, place], LAYOUT.entries[1:], LAYOUT.offsets[1:])
    assert tensor.numel() == 0


# ---------------------------------------------------------------- in the engine's processes: model and driver stand in

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


class Model:
    """params: this rank's."""

    def __init__(self, **params: torch.Tensor) -> None:
        self.params = params
        self.loaded: dict[str, torch.Tensor] = {}
        self.addresses: list[int] = []

    def named_parameters(self):
        return self.params.items()

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.addresses.append(tensor.data_ptr())
            self.loaded[name] = tensor.clone()


@pytest.fixture
def mapping(monkeypatch):
    """Of an engine's first rank."""
    parallel = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", parallel)
    monkeypatch.setattr(region_weights, "_mapping", region_weights._Mapping())
    return region_weights._mapping


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


def _load(region: Region, weights=WEIGHTS, model: Model | None = None, **place) -> Model:
    layout, model = _layout(weights), model or Model()
    at = Place(**{"pid": os.getpid(), "fd": region.fd, "nbytes": region.nbytes, **place})
    mapped = msgspec.json.encode(Mapped([at], layout.entries, layout.offsets)).decode()
    sglang_weights.load_in_engine(model, [(mapped, torch.zeros(0))])
    return model


def test_a_model_loads_tensors_that_lie_in_the_region(mapping, region):
    model = _load(region[0])
    assert all(model.loaded[name].equal(tensor) and model.loaded[name].dtype == tensor.dtype for name, tensor in WEIGHTS.items())
    start = torch.frombuffer(mapping._region.view, dtype=torch.uint8).data_ptr()
    assert all(start <= address < start + region[0].nbytes for address in model.addresses), "a copy was made on the way"


def test_an_adapter_is_the_trainers_to_the_bit_and_outlives_the_region(mapping, region):
    layout, loaded = _layout(WEIGHTS), {}
    at = Place(os.getpid(), region[0].fd, region[0].nbytes)
    runner = SimpleNamespace(model=Model())
    runner.load_lora_adapter_from_tensors = lambda ref, tensors, config: loaded.update(tensors, config=config)
    asked = SimpleNamespace(
        load_format=scheduler_lora.LORA_FORMAT, config_dict={"r": 4}, to_ref=lambda: "ref",
        serialized_tensors=msgspec.json.encode(Mapped([at], layout.entries, layout.offsets)).decode(),
    )  # fmt: skip
    scheduler_lora.load(None, SimpleNamespace(model_runner=runner), asked)
    region[0].view[:] = bytes(region[0].nbytes)  # the next sync's
    assert loaded.pop("config") == {"r": 4} and loaded.keys() == WEIGHTS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in WEIGHTS.items())
    asked.load_format = None
    assert scheduler_lora.load(lambda *given: given, "worker", asked) == ("worker", asked), "another client's"


def test_the_next_sync_finds_the_memory_mapped_and_what_is_new_in_it(mapping, region):
    _load(region[0])
    mapped = mapping._region
    region[0].view[:4] = as_bytes(torch.tensor([7.0]))
    assert _load(region[0]).loaded["a"][0, 0] == 7.0 and mapping._region is mapped
    larger = {**WEIGHTS, "c": torch.zeros(100)}
    region.append(_region(larger))
    assert _load(region[1], larger).loaded["c"].equal(larger["c"]) and mapping._region is not mapped


def test_what_a_rank_has_by_columns_goes_to_its_device_whole_and_nothing_else_does(mapping, region):
    device = {"a": torch.empty(2, 1, device="meta"), "b": torch.empty(3, device="meta")}
    found = _load(region[0], model=Model(**device)).loaded
    assert (found["a"].device.type, found["a"].shape, found["b"].device.type) == ("meta", (2, 3), "cpu")
    by_rows = Model(a=torch.empty(1, 3, device="meta"))
    assert {it.device.type for it in _load(region[0], model=by_rows).loaded.values()} == {"cpu"}


def test_a_batch_without_tensors_is_mapped_and_no_model_is_touched(mapping, region):
    model = Model()
    model.load_weights = None
    _load(region[0], {}, model)
    assert mapping._region is not None and mapping._region.nbytes == region[0].nbytes


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
