"""Weights on their way through shared memory, to a stand-in of the engine behind verl's adapter."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

NAME = "verl_mux_cpu.cpu_server_adapter"
TIED = torch.arange(6.0).reshape(2, 3)


class Engine:
    """Loads what it is told to load, at once."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.folder: Path | None = None

    async def _make_async_request(self, endpoint: str, payload: dict) -> None:
        assert endpoint == "update_weights_from_disk" and payload["flush_cache"]
        self.folder = Path(payload["model_path"])
        assert (self.folder / "config.json").read_text() == "{}"
        self.weights = load_file(self.folder / "model.safetensors")


class Server:
    def __init__(self) -> None:
        self.version = None
        self.set_global_steps = SimpleNamespace(remote=self._set)

    async def _set(self, version: int) -> None:
        self.version = version


@pytest.fixture
def ours(monkeypatch) -> ModuleType:
    """Our module over a stand-in of verl's, which imports SGLang."""
    stock = ModuleType("verl.workers.rollout.sglang_rollout.sglang_rollout")
    stock.ServerAdapter = object
    monkeypatch.setitem(sys.modules, stock.__name__, stock)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME)


@pytest.fixture
def adapter(ours, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    made = ours.CpuServerAdapter()
    made.model_config = SimpleNamespace(local_path=str(tmp_path / "model"))
    made._engine, made.server_actor = Engine(), Server()
    made._init_server_adapter = lambda: asyncio.sleep(0)
    return made


async def arriving(weights: dict[str, torch.Tensor]):
    for pair in weights.items():
        yield pair


@pytest.mark.parametrize("give", [arriving, lambda weights: iter(weights.items())], ids=["checkpoint engine", "trainer's worker"])
def test_the_engine_holds_the_weights_and_their_version_and_the_folder_is_gone(adapter, give):
    asyncio.run(adapter.update_weights(give({"a": TIED, "b": torch.ones(2, dtype=torch.bfloat16)}), global_steps=3))
    engine = adapter._engine
    assert engine.weights["a"].equal(TIED) and engine.weights["b"].dtype == torch.bfloat16
    assert adapter.server_actor.version == 3 and not engine.folder.exists()


def test_tied_weights_of_a_trainer_arrive_under_both_names(adapter):
    asyncio.run(adapter.update_weights(iter([("embed", TIED), ("head", TIED)])))
    assert adapter._engine.weights["head"].equal(TIED) and adapter.server_actor.version is None


def test_a_rank_beside_the_first_takes_part_and_hands_nothing_over(adapter):
    adapter._engine = None
    drained = []
    asyncio.run(adapter.update_weights((drained.append(name) or (name, TIED) for name in "ab"), global_steps=3))
    assert drained == ["a", "b"] and adapter.server_actor.version is None


def test_what_a_dead_process_left_is_removed_and_nothing_else(ours, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f"verl_mux_{dead.pid}_a", f"verl_mux_{os.getpid()}_b", "verl_mux_notes", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    ours.remove_orphans(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names[1:])
