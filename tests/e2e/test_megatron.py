"""A job that trains with Megatron, tensor parallel over two ranks and with a reference model, takes turns with one on FSDP2. What
its engine has in each step is what its trainer wrote as a checkpoint after the step before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.coordinator_process import CoordinatorProcess
from bench.rollouts.modes import read_run
from tests.e2e import tiny
from tests.gpu import scenes
from verl_mux.profiling.eventlog import events

pytestmark = pytest.mark.e2e

STEPS, JOBS = 3, ("megatron", "fsdp2")
REF = "actor_rollout_ref"
BOTH = [
    "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=3", f"{REF}.rollout.calculate_log_probs=true",
    f"{REF}.actor.ppo_micro_batch_size_per_gpu=8", f"{REF}.rollout.log_prob_micro_batch_size_per_gpu=8",
]  # fmt: skip
MEGATRON = [
    "model_engine=megatron", f"{REF}.actor.strategy=megatron", f"{REF}.actor.megatron.tensor_model_parallel_size=2",
    f"{REF}.actor.use_kl_loss=true", f"{REF}.ref.log_prob_micro_batch_size_per_gpu=8",
    "trainer.save_freq=1", f"{REF}.actor.checkpoint.save_contents=[hf_model]",
]  # fmt: skip

# In each process of a job: an engine's scheduler writes what it has after each sync.
SITE = """
from verl_mux.post_import import after_import
after_import("verl_mux.rollout.engine.sglang.sglang_weights", "engine_weights")
"""
ENGINE_WEIGHTS = """
import itertools, pathlib, torch
from verl_mux.rollout.engine.sglang import sglang_weights

load, versions = sglang_weights.load_in_engine, itertools.count()

def load_and_write(model, named_tensors):
    load(model, named_tensors)
    if '"entries":[]' in named_tensors[0][0]:
        return  # the engine was shown the memory, before the first weights
    held = {name: it.detach().clone() for name, it in model.named_parameters()}
    torch.save(held, pathlib.Path(__file__).with_name(f"engine_{next(versions)}.pt"))

sglang_weights.load_in_engine = load_and_write
"""
# SGLang's matrices of several of the checkpoint's.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def ran(assets, tmp_path_factory) -> Path:
    """The folder of both jobs and of their coordinator's log."""
    directory = tmp_path_factory.mktemp("megatron")
    (directory / "sitecustomize.py").write_text(SITE)
    (directory / "engine_weights.py").write_text(ENGINE_WEIGHTS)
    pools = {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0", "gpus": 2}]}}
    keys = [*tiny.overrides(assets, STEPS), *BOTH]
    with pytest.MonkeyPatch.context() as patch, CoordinatorProcess({"pools": pools}, directory / "coordinator") as coordinator:
        started = {"fsdp2": tiny.start_job("fsdp2", keys, directory, coordinator.address)}
        patch.setenv("PYTHONPATH", os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep))
        started["megatron"] = tiny.start_job("megatron", [*keys, *MEGATRON], directory, coordinator.address)
        try:
            for name, process in started.items():
                assert process.wait(600) == 0, (directory / name / "job.log").read_text()[-3000:]
        finally:
            for process in started.values():
                process.kill()
    return directory


def test_both_do_their_steps_and_hold_nothing_between_their_phases(ran):
    for job in JOBS:
        assert [e["step"] for e in tiny.events(ran, job) if e["event"] == events.STEP] == list(range(1, STEPS + 1))
        assert tiny.held_without_lease(ran, job) == []


def test_its_engine_generates_as_its_trainer_would(ran):
    metrics = read_run("mux_separate", 7, ran / "megatron").metrics
    assert scenes.weights_agree([metrics[step] for step in sorted(metrics)], STEPS) == []


def test_its_engine_has_bit_for_bit_what_its_trainer_saved(ran, assets):
    import torch
    from safetensors.torch import load_file

    trained = [ran / "megatron" / "checkpoints" / f"global_step_{step}" / "actor" for step in range(1, STEPS)]
    before: dict = {}
    for version, folder in enumerate([assets / "model", *trained]):
        saved, engine = {}, torch.load(ran / f"engine_{version}.pt")
        for path in folder.rglob("*.safetensors"):
            saved |= load_file(path)
        for name, held in engine.items():
            *path, kind, what = name.split(".")
            parts = [".".join([*path, part, what]) for part in JOINED.get(kind, (kind,))]
            # Megatron trains in bfloat16, so the first version is the model's weights in that type.
            expected = torch.cat([saved.pop(part) for part in parts]).bfloat16().to(held.dtype)
            # The engine pads its vocabulary.
            assert held[: len(expected)].equal(expected) and not held[len(expected) :].any(), (version, name)
        assert set(saved) <= {"lm_head.weight"}
        assert not before or any(not held.equal(before[name]) for name, held in engine.items()), "a step trained nothing"
        before = engine


def test_its_weights_are_exported_in_parts_under_its_training_lease(ran):
    sleeps = [e for e in tiny.events(ran, "megatron") if e["event"] == events.SLEEP]
    parts = [e for e in sleeps if e["extra"]["tag"] == "exported"]
    syncs = [e["extra"]["bytes"] for e in tiny.events(ran, "megatron") if e["event"] == events.SYNC]
    assert [e["extra"]["bytes"] for e in parts[:STEPS]] == syncs and len(parts) == STEPS + 1
    assert all(e["duration_sec"] > 0 and e["extra"]["mapped"] == 0 for e in parts)
    freed = {e["extra"]["tag"] for e in sleeps if e["extra"]["side"] == "train" and e["extra"]["bytes"]}
    assert freed == {"params", "optimizer", "gradients", "exported"}
