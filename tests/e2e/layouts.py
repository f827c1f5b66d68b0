"""Layouts of engines and training ranks, training engines, algorithms and roles, each as a real job of three steps, alone: are
its engines' weights its trainer's?

python -m tests.e2e.layouts FOLDER [LAYOUT...]: one job after the other, JSON on stdout, exit code 1 where something was wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.rollouts.modes import read_run
from tests.e2e import tiny
from tests.e2e.real_faults import TOOL
from tests.gpu.scenes import weights_agree
from verl_mux.profiling.eventlog import events

STEPS = 3
_LIMIT_S = 600
# Two cores, and on each side of a job up to two GPUs of its node.
_JOB = [
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    # Stale weights are other weights.
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "ray_kwargs.ray_init.num_gpus=4",
    # What one of two ranks has of a step.
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
]
_MEGATRON, _SIZE = ["model_engine=megatron", "actor_rollout_ref.actor.strategy=megatron"], "actor_rollout_ref.actor.megatron"
_VEOMNI = ["model_engine=veomni", "actor_rollout_ref.actor.strategy=veomni"]
# verl says where an engine and a trainer differ, token by token; both compute in the same type on a CPU.
_LEAST = 0.99
_EXPERTS = ["actor_rollout_ref.model.path={assets}/experts"]
_CRITIC = [
    "algorithm.adv_estimator=gae", "critic.model.path={assets}/{model}", "critic.ppo_micro_batch_size_per_gpu=8",
    "critic.optim.lr=1e-2",
]  # fmt: skip
# A prompt a step: how many others are drawn does not depend on which responses end first.
_FILTERED = [
    "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=even",
    "reward.custom_reward_function.path={assets}/even_reward.py", "data.train_batch_size=1", "data.shuffle=false",
    "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
]  # fmt: skip
_CUTS = [
    "mux.rollout.oversample.rate=0.5", "mux.rollout.segments.segment_length=16", "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]  # fmt: skip

_TEACHER = "distillation.teacher_models.teacher_model"
# A teacher's engine has a GPU of its own.
_TAUGHT = [
    "distillation.enabled=true", "distillation.nnodes=1", "distillation.n_gpus_per_node=1",
    f"{_TEACHER}.model_path={{assets}}/untied", f"{_TEACHER}.num_replicas=1", f"{_TEACHER}.key=sums",
    f"{_TEACHER}.inference.tensor_model_parallel_size=1", f"{_TEACHER}.inference.max_model_len=128",
]  # fmt: skip


class Layout(NamedTuple):
    """`engine_gpus`: on the rollout side, or where `mode` has one pool, on that. `megatron`: the dimension that its ranks divide;
    None: FSDP2 shards the model over them. `keys`: of the job's, in which `{assets}` is the folder of what it reads. `older`:
    tokens of older weights are trained. `resumed`: it ends after a step and goes on from its checkpoint. `like`: the layout
    whose rewards, step by step, it has to have."""

    mode: str = "mux_separate"
    engine_gpus: int = 1
    tensor: int = 1
    ranks: int = 1
    megatron: str | None = None
    keys: Sequence[str] = ()
    older: bool = False
    resumed: bool = False
    like: str | None = None

    @property
    def replicas(self) -> int:
        return self.engine_gpus // self.tensor

    def overrides(self, assets: Path) -> list[str]:
        rollout = "actor_rollout_ref.rollout"
        divided = () if self.megatron in (None, "data") else (f"{_SIZE}.{self.megatron}_model_parallel_size={self.ranks}",)
        return [
            f"{rollout}.n_gpus_per_node={self.engine_gpus}",
            f"{rollout}.tensor_model_parallel_size={self.tensor}",
            f"trainer.n_gpus_per_node={self.ranks}",
            *([] if self.megatron is None else [*_MEGATRON, *divided]),
            *([] if self.mode.startswith("mux_") else [f"{rollout}.nnodes=0"]),
            *(key.replace("{assets}", str(assets)) for key in self.keys),
        ]


def _critic(model: str) -> list[str]:
    return [key.replace("{model}", model) for key in _CRITIC]


LAYOUTS = {
    "separate": Layout(),
    "separate, TP 2": Layout(engine_gpus=2, tensor=2),
    "separate, two replicas": Layout(engine_gpus=2),
    "separate, two ranks": Layout(ranks=2),
    "separate, TP 2, two ranks": Layout(engine_gpus=2, tensor=2, ranks=2),
    "colocated": Layout("mux_colocate"),
    "colocated, TP 2, two ranks": Layout("mux_colocate", engine_gpus=2, tensor=2, ranks=2),
    "colocated, two replicas, two ranks": Layout("mux_colocate", engine_gpus=2, ranks=2),
    "separate, Megatron TP 2": Layout(ranks=2, megatron="tensor"),
    "separate, Megatron PP 2": Layout(ranks=2, megatron="pipeline"),
    "separate, Megatron DP 2": Layout(ranks=2, megatron="data"),
    "separate, Megatron EP 2": Layout(ranks=2, megatron="expert", keys=_EXPERTS),
    "separate, Megatron TP 2, resumed": Layout(ranks=2, megatron="tensor", resumed=True),
    "colocated, Megatron TP 2": Layout("mux_colocate", engine_gpus=2, ranks=2, megatron="tensor"),
    "separate, VeOmni, two ranks": Layout(ranks=2, keys=_VEOMNI),
    "experts": Layout(keys=_EXPERTS),
    "PPO": Layout(keys=_critic("model")),
    "PPO, Megatron TP 2": Layout(
        ranks=2, megatron="tensor", keys=[*_critic("untied"), "critic.megatron.tensor_model_parallel_size=2"]
    ),
    "GSPO": Layout(keys=["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"]),
    "REINFORCE++": Layout(keys=["algorithm.adv_estimator=reinforce_plus_plus"]),
    "RLOO": Layout(keys=["algorithm.adv_estimator=rloo"]),
    "ReMax": Layout(keys=["algorithm.adv_estimator=remax"]),
    "several turns": Layout(keys=TOOL),
    "a teacher": Layout(keys=_TAUGHT),  # on vLLM
    "DAPO": Layout(keys=_FILTERED),
    "DAPO, colocated": Layout("mux_colocate", keys=_FILTERED, like="DAPO"),
    "DAPO, over-sampling and segments": Layout(keys=[*_FILTERED, *_CUTS], older=True),
}


def main() -> None:
    folder, names = Path(sys.argv[1]).absolute(), sys.argv[2:] or list(LAYOUTS)
    assets = folder / "assets"
    if not assets.exists():
        assets.mkdir(parents=True)
        tiny.make_assets(assets, hidden=256)
        tiny.make_other_models(assets)
    results = {name: play(LAYOUTS[name], folder, assets, name.replace(", ", "_").replace(" ", "_").lower()) for name in names}
    for name, found in results.items():
        if (like := results.get(LAYOUTS[name].like)) and like.get("reward") != found.get("reward"):
            found["wrong"].append(f"rewards differ from those of {LAYOUTS[name].like}")
    print(json.dumps(results, indent=2))
    sys.exit(any(it["wrong"] for it in results.values()))


def play(layout: Layout, folder: Path, assets: Path, name: str) -> dict[str, Any]:
    """Runs it; its figures, and what was wrong, a line each."""
    nodes = ["mux.nodes.rollout=[n0]", "mux.nodes.train=[n0]"] if layout.mode == "mux_colocate" else []
    metrics: dict[int, dict[str, float]] = {}
    for steps in (1, STEPS) if layout.resumed else (STEPS,):
        saved = [f"trainer.save_freq={steps}"] if layout.resumed else []
        overrides = [*tiny.overrides(assets, steps, layout.mode), *_JOB, *layout.overrides(assets), *saved]
        code = tiny.start_job(name, overrides, folder, None, *nodes).wait(_LIMIT_S)
        if code:
            return {"wrong": [f"exit code {code}: {(folder / name / 'job.log').read_text()[-3000:]}"]}
        metrics |= read_run(layout.mode, 0, folder / name).metrics
    steps = [metrics[step] for step in sorted(metrics)]
    return {**figures(steps, tiny.events(folder, name)), "wrong": wrong(layout, steps, folder, name)}


def figures(metrics: Sequence[Mapping[str, float]], trainer: Sequence[dict]) -> dict[str, Any]:
    syncs = [event for event in trainer if event["event"] == events.SYNC]
    return {
        "reward": [step["critic/score/mean"] for step in metrics],
        "correlation": [step["training/rollout_actor_probs_pearson_corr"] for step in metrics],
        "evicted": [step.get("training/filter_groups/evicted_samples", 0) for step in metrics],
        "sync_s": [event["duration_sec"] for event in syncs],
        "sync_bytes": [event["extra"].get("bytes", 0) for event in syncs],
    }


def wrong(layout: Layout, metrics: Sequence[Mapping[str, float]], folder: Path, name: str) -> list[str]:
    # Tokens of older weights have other probabilities.
    agree = [] if layout.older else weights_agree(metrics, STEPS, _LEAST)
    found = [*agree, *tiny.held_without_lease(folder, name)]
    served = [event for event in tiny.events(folder, name, "server") if event["event"] == events.ENGINE_GENERATE]
    generating = {event["extra"]["replica"] for event in served}
    if generating != set(range(layout.replicas)):
        found.append(f"replicas {sorted(generating)} generated, of {layout.replicas}")
    versions = [event["extra"]["version"] for event in tiny.events(folder, name) if event["event"] == events.SYNC]
    return found if versions == list(range(STEPS)) else [*found, f"syncs of versions {versions}, not one a step"]


if __name__ == "__main__":
    main()
