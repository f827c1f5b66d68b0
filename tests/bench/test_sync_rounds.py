"""What stands for an inference engine beside verl's own checkpoint engines; and one small run of it."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("verl")
from bench.sync_rounds.workers import LoadedWeights, digest_of

WEIGHTS = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}


def test_the_digest_is_of_names_and_bits_in_whatever_order():
    wanted = digest_of(WEIGHTS.items())
    assert digest_of(reversed(WEIGHTS.items())) == wanted
    assert digest_of({**WEIGHTS, "b": WEIGHTS["b"] + 1}.items()) != wanted
    assert digest_of({"b": WEIGHTS["b"], "c": WEIGHTS["a"]}.items()) != wanted


def test_an_engine_has_a_copy_of_its_own(tmp_path):
    one, other = LoadedWeights(), LoadedWeights()
    for version in (1.0, 2.0):
        weights = {name: tensor * version for name, tensor in WEIGHTS.items()}
        for name, tensor in weights.items():
            one.load(name, tensor)
        save_file(weights, tmp_path / "model.safetensors")
        asyncio.run(other._make_async_request("update_weights_from_disk", {"model_path": str(tmp_path)}))
        wanted = digest_of(weights.items())
        weights["b"].zero_()
        assert one.digest() == other.digest() == wanted


@pytest.mark.e2e
def test_beside_naive_every_engine_gets_every_bit(python):
    """On this bed of verl's own only `naive` runs; each other one is named with what it lacks."""
    done = python("-m", "verl_mux", "bench", "sync", "--beside", "--model-mib", "16", "--json", timeout=900.0)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["beside"]
    assert found["naive"].get("bit_equal") is True, found["naive"]
    assert all(it["why_not"] for name, it in found.items() if name != "naive") and {"nccl", "nixl", "kimi"} <= found.keys()
