"""A job small enough for a test: a 0.1 M parameter Qwen2 and some hundred sums, made in a second."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from uuid import uuid4

import yaml

from bench.rollouts.modes import read_run
from verl_mux_cpu import device_ledger

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    # Any rule that depends on the sampled text will do: the share of digits in it.
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
"""

# The same, and a metric that differs in every second group of two, however long its responses are and whatever is learnt.
EVEN_REWARD = REWARD.replace("return ", 'return {"even": sum(map(ord, solution_str)) % 2, "score": ') + "    }\n"

# The first, as slow as a judge on another machine: its job leaves the cores to what starts up beside it.
SLOW_REWARD = f"import time\n{REWARD}".replace("    return", "    time.sleep(0.5)\n    return")

# The usual loss, in a training phase that lasts longer than a job goes on without its coordinator's answer; the cores are free.
SLOW_LOSS = """
import time
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss

@register_policy_loss("slow")
def compute_policy_loss(*arguments, **keywords):
    time.sleep(3.0)
    return compute_policy_loss_vanilla(*arguments, **keywords)
"""


# The engine of this environment, and what one of its engines gets of the device for its KV cache. vLLM's prefix cache has whole
# blocks only.
ENGINE = next(name for name in ("sglang", "vllm") if importlib.util.find_spec(name))
_CACHE = {"sglang": ["max_total_tokens=8192"], "vllm": [f"kv_cache_memory_bytes={64 << 20}", "block_size=16"]}

# As the engine's own argument: the job's check does not know it, and lets over-sampling fill more.
_AT_ONCE = {"sglang": "max_running_requests", "vllm": "max_num_seqs"}


def at_once(requests: int) -> str:
    """The key by which an engine runs so many requests at once."""
    return f"+actor_rollout_ref.rollout.engine_kwargs.{ENGINE}.{_AT_ONCE[ENGINE]}={requests}"


def make_assets(directory: Path, hidden: int = 64) -> None:
    """`directory`/model, /train.parquet, /reward.py, /even_reward.py, /slow_reward.py, /slow_loss.py.

    hidden: of the model; with 256 its four heads have a size that kernels and several ranks know. vLLM's attention on a CPU knows
    none below 32.
    """
    import pandas
    import torch
    from transformers import AutoTokenizer

    sys.path.insert(0, str(EXAMPLE))
    from model import Shape, make_model, write_tokenizer

    model = directory / "model"
    write_tokenizer(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    shape = Shape(hidden=hidden, layers=2, heads=4 if hidden >= 128 else 2, intermediate=2 * hidden)
    make_model(shape, tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rng = random.Random(0)
    rows = [_row(i, rng.randrange(90), rng.randrange(90)) for i in range(400)]
    pandas.DataFrame(rows).to_parquet(directory / "train.parquet")
    (directory / "reward.py").write_text(REWARD)
    (directory / "even_reward.py").write_text(EVEN_REWARD)
    (directory / "slow_reward.py").write_text(SLOW_REWARD)
    (directory / "slow_loss.py").write_text(SLOW_LOSS)


def make_other_models(directory: Path) -> None:
    """`directory`/experts, two of four for each token, and /untied, a model of the first's sizes, beside `make_assets`' model."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer, dense = AutoTokenizer.from_pretrained(directory / "model"), AutoConfig.from_pretrained(directory / "model")
    dense.tie_word_embeddings = False
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    experts = Qwen3MoeConfig(
        **{name: getattr(dense, name) for name in sizes}, head_dim=dense.hidden_size // dense.num_attention_heads, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=dense.hidden_size // 2, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    for name, model in (("experts", Qwen3MoeForCausalLM(experts)), ("untied", Qwen2ForCausalLM(dense))):
        for part, param in model.named_parameters():
            # Which experts a token goes to is clear, in whatever precision it is computed.
            param.data *= 50 if part.endswith("mlp.gate.weight") else 1
        model.to(torch.float32).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)


def assets_in(folder: Path) -> Path:
    """`folder`/assets, in a new folder."""
    (folder / "assets").mkdir(parents=True)
    make_assets(folder / "assets")
    return folder / "assets"


def _row(index: int, a: int, b: int) -> dict:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"index": index},
    }


def overrides(assets: Path, steps: int, mode: str = "mux_separate") -> list[str]:
    """verl's keys for a tiny job of `steps` steps."""
    return [
        f"trainer.v1.trainer_mode={mode}",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={assets}/train.parquet",
        f"data.val_files={assets}/train.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=32",
        "data.max_response_length=32",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={assets}/model",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.rollout.name={ENGINE}",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        *(f"+actor_rollout_ref.rollout.engine_kwargs.{ENGINE}.{key}" for key in _CACHE[ENGINE]),
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={assets}/reward.py",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={steps}",
        "trainer.logger=[console]",
        "mux.seeded_sampling=true",
        "+ray_kwargs.ray_init.num_gpus=2",
        "ray_kwargs.ray_init.num_cpus=64",
        "+ray_kwargs.ray_init.include_dashboard=False",
        # Two engines and a third that joins fit, with what each would keep on a GPU.
        *(["mux.device.budget=16"] if mode.startswith("mux_") else []),
    ]


def pools() -> dict[str, dict]:
    """One rollout node and one training node of this machine, each a core and a logical GPU."""
    sides = {"rollout": {"name": "r0", "gpu_ids": [0], "cpus": [0]}, "train": {"name": "t0", "gpu_ids": [1], "cpus": [1]}}
    return {side: {"nodes": [{"host": socket.gethostname(), **node}]} for side, node in sides.items()}


def run_file(
    path: Path, directory: Path, jobs: dict[str, list[str]], environment: dict[str, str], restarts: dict[str, int], **coordinator
) -> Path:  # fmt: skip
    """A run file for `jobs` ({name: overrides}) on one rollout node and one training node. `restarts`: how many, by job."""
    spec = {
        "dir": str(directory),
        "coordinator": {"pools": pools(), **coordinator},
        "environment": {**ENVIRONMENT, **_own_devices(directory), **environment},
        "jobs": {
            name: {"nodes": {"rollout": ["r0"], "train": ["t0"]}, "seed": 7, "overrides": keys, "restarts": restarts.get(name, 0)}
            for name, keys in jobs.items()
        },
    }
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_LOGGING_LEVEL": "WARN",
    "RAY_worker_niceness": "0",
    # Ray starts workers before anybody asks for one, as many as it was told of CPUs, and counts what nobody here reads.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    # What else runs on the machine may fill its memory; a worker killed for that says nothing about the code.
    "RAY_memory_monitor_refresh_ms": "0",
}


def _own_devices(directory: Path) -> dict[str, str]:
    """The devices of one run's nodes are not those of another run's nodes of the same names."""
    return {device_ledger.DIRECTORY_VARIABLE: str(directory / "devices")}


def start_job(name: str, overrides: list[str], directory: Path, address: str | None, *more: str) -> subprocess.Popen:
    """A job by verl's own command line, with processes that are forks; its log is `directory/name/job.log`."""
    home = directory / name
    home.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "verl_mux.warm.fork_server",
        "verl.trainer.main_ppo", "--config-name", "mux_ppo_trainer", *overrides,
        f"mux.job={name}", f"mux.coordinator={address or 'null'}", "mux.seed=7", "mux.nodes.rollout=[r0]", "mux.nodes.train=[t0]",
        f"mux.profile.dir={home / 'events'}", f"trainer.default_local_dir={home / 'checkpoints'}",
        f"hydra.run.dir={home / 'hydra'}", *more,
    ]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, **_own_devices(directory), "VERL_MUX_JOB_UID": uuid4().hex}
    with (home / "job.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=home)


def ended(event: dict) -> float:
    """When an event ended, in seconds since the epoch."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def events(directory: Path, job: str, role: str = "trainer") -> list[dict]:
    """All events of a job's role, in order of their ends."""
    found = []
    for path in (directory / job / "events" / role).glob("step_*/worker_*.jsonl"):
        found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(found, key=lambda event: event["timestamp"])


def figures(directory: Path, job: str, step: int, prefix: str = "mux/rollout/") -> dict[str, float]:
    """verl's metrics of a step whose names begin with `prefix`, without it; of the job's log."""
    logged = read_run("", 0, directory / job).metrics[step]
    return {name.removeprefix(prefix): value for name, value in logged.items() if name.startswith(prefix)}


def held_without_lease(directory: Path, job: str) -> list[str]:
    """Tagged memory that the job still had on a side's devices when it gave such a lease back, a line each."""
    moves = [e for role in ("trainer", "server") for e in events(directory, job, role) if e["event"] in ("sleep", "wake")]
    moves.sort(key=lambda event: event["timestamp"])
    found = []
    for phase in (e for e in events(directory, job) if e["event"] == "phase"):
        side, last = "rollout" if phase["extra"]["phase"] == "rollout" else "train", {}
        for move in moves:
            if move["extra"]["side"] == side and move["timestamp"] <= phase["timestamp"]:
                last[move["extra"]["tag"], move["workid"]] = move["extra"]["mapped"]
        found += [f"{tag}: {held} bytes after {phase['extra']}" for (tag, _), held in last.items() if held]
    return found
