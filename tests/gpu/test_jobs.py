"""Real jobs on one GPU: two that share it by turns, and models of other kinds: right, or refused at start."""

import json
import os

import pytest

from tests.e2e import tiny
from tests.gpu import record, scenes

pytestmark = pytest.mark.gpu
STEPS = 5
NOTED = ("mux/", "timing_s/", "perf/")  # verl's metrics
POOL = {"gpu": {"nodes": [{"name": "g0", "gpus": 1}, {"name": "g01", "gpus": 2}]}}
# Probabilities are compared, so the engine gives them. With the learning rate of tiny.py (1e-3) those of the step before have a
# correlation of 0.4 to 0.5 with the second step's.
OVERRIDES = [
    "mux.device.budget=null", "mux.seeded_sampling=false", "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.rollout.calculate_log_probs=true", "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    "trainer.logger=[console,file]",
    "ray_kwargs.ray_init.num_gpus=1",
    # Without a flash attention package of the trainer's.
    "actor_rollout_ref.model.use_remove_padding=false", "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
]  # fmt: skip
TWO_GPUS = [
    "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
]  # fmt: skip
LORA = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=true"]
KINDS = {"merged LoRA": LORA, "LoRA": LORA[:1]}
REFUSED = {
    "fp8": (["+actor_rollout_ref.rollout.quantization=fp8"], "actor_rollout_ref.rollout.quantization=fp8 is not supported"),
    "megatron": (["actor_rollout_ref.actor.strategy=megatron"], "set model_engine=megatron, which brings them"),
}


@pytest.fixture(scope="module")
def assets(gpus, tmp_path_factory):
    pytest.importorskip("verl")
    folder = tmp_path_factory.mktemp("assets")
    tiny.make_assets(folder, hidden=256)
    return folder


@pytest.fixture(scope="module")
def coordinator(gpus):
    from verl_mux.coordinator.config import make_config
    from verl_mux.coordinator.server import Coordinator

    class Lines:
        grants = []

        def log(self, event, duration_sec=None, extra=None, step=None, timestamp=None):
            import time

            if event == "lease_held":
                self.grants.append((extra["job"], time.monotonic() - duration_sec, time.monotonic()))

    with Coordinator(make_config({"pools": POOL}), event_log=Lines()) as running:
        running.grants = Lines.grants
        yield running


@pytest.fixture
def start(assets, coordinator, tmp_path, monkeypatch):
    """Starts a job of so many steps; gives (exit code, verl's metrics by step, its log)."""
    monkeypatch.setattr(tiny, "ENVIRONMENT", {"VERL_LOGGING_LEVEL": "WARN", "VERL_FILE_LOGGER_ROOT": str(tmp_path)})
    started = {}

    def begin(name, *more, steps=STEPS, node="g0"):
        overrides = [*tiny.overrides(assets, steps, "mux_colocate"), *OVERRIDES, "trainer.project_name=p",
                     f"trainer.experiment_name={name}", *more]  # fmt: skip
        nodes = [f"mux.nodes.rollout=[{node}]", f"mux.nodes.train=[{node}]"]  # after those that `start_job` gives every job
        started[name] = tiny.start_job(name, overrides, tmp_path, coordinator.address, *nodes)
        return name

    def end(name):
        code = started[name].wait(timeout=1200)
        logged = [json.loads(line)["data"] for line in _metrics(tmp_path, name)]
        record.note(**{f"{name} steps": [{k: v for k, v in it.items() if k.startswith(NOTED)} for it in logged]})
        return code, logged, (tmp_path / name / "job.log").read_text()[-3000:]

    yield begin, end
    for process in started.values():
        process.kill()
        process.wait()


def _metrics(folder, name):
    path = folder / "p" / f"{name}.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_two_jobs_take_turns_on_one_gpu_and_each_engine_has_its_trainers_weights(start, coordinator):
    """They start at the same time: each makes contexts while the other loads."""
    begin, end = start
    names = [begin("a"), begin("b")]
    for name in names:
        code, steps, log = end(name)
        assert code == 0, log
        assert scenes.weights_agree(steps, STEPS) == []
    assert scenes.in_turns([grant for grant in coordinator.grants if grant[0] in names]) == []


def test_two_jobs_of_two_ranks_each_take_turns_on_two_gpus(start, coordinator, gpus):
    if gpus < 2:
        pytest.skip("one GPU: tensor parallelism needs two")
    begin, end = start
    names = [begin("c", *TWO_GPUS, node="g01"), begin("d", *TWO_GPUS, node="g01")]
    for name in names:
        code, steps, log = end(name)
        assert code == 0, log
        assert scenes.weights_agree(steps, STEPS) == []
    assert scenes.in_turns([grant for grant in coordinator.grants if grant[0] in names]) == []


@pytest.mark.parametrize("kind", [*KINDS, "mixture of experts"])
def test_other_models_are_right(start, assets, tmp_path, kind):
    begin, end = start
    more = KINDS.get(kind) or [f"actor_rollout_ref.model.path={_mixture(assets, tmp_path)}"]
    code, steps, log = end(begin(kind.replace(" ", "-"), *more, steps=2))
    assert code == 0, log
    assert scenes.weights_agree(steps, 2) == []


@pytest.mark.parametrize("kind", [*REFUSED, "sliding window"])
def test_what_would_be_wrong_is_refused_by_name(start, assets, tmp_path, kind):
    begin, end = start
    more, words = REFUSED.get(kind) or (
        [f"actor_rollout_ref.model.path={_windowed(assets, tmp_path)}"],
        "sliding-window attention",
    )
    code, _, log = end(begin("refused", *more))
    assert code == 2 and words in log


def _copied(assets, folder):
    model = folder / "model"
    model.mkdir()
    for path in (assets / "model").iterdir():
        os.link(path, model / path.name)
    return model


def _windowed(assets, folder):
    model = _copied(assets, folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps({**config, "use_sliding_window": True, "sliding_window": 128}))
    return model


def _mixture(assets, folder):
    """A tiny Qwen3 of eight experts over the same tokenizer."""
    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    model, dense = _copied(assets, folder), AutoConfig.from_pretrained(assets / "model")
    for name in ("config.json", "model.safetensors"):
        (model / name).unlink()
    config = Qwen3MoeConfig(
        vocab_size=dense.vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=128, eos_token_id=dense.eos_token_id, pad_token_id=dense.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(model)
    return model
