"""Layouts of engines and training ranks, each as a real job of three steps, alone: are its engines' weights its trainer's?

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
# verl says where an engine and a trainer differ, token by token; both compute in the same type on a CPU.
_LEAST = 0.99


class Layout(NamedTuple):
    """`engine_gpus`: on the rollout side, or where `mode` has one pool, on that. `megatron`: the dimension that its ranks divide;
    None: FSDP2 shards the model over them."""

    mode: str
    engine_gpus: int
    tensor: int
    ranks: int
    megatron: str | None = None

    @property
    def replicas(self) -> int:
        return self.engine_gpus // self.tensor

    def overrides(self) -> list[str]:
        rollout = "actor_rollout_ref.rollout"
        return [
            f"{rollout}.n_gpus_per_node={self.engine_gpus}",
            f"{rollout}.tensor_model_parallel_size={self.tensor}",
            f"trainer.n_gpus_per_node={self.ranks}",
            *([] if self.megatron is None else [*_MEGATRON, f"{_SIZE}.{self.megatron}_model_parallel_size={self.ranks}"]),
        ]


LAYOUTS = {
    "separate": Layout("mux_separate", engine_gpus=1, tensor=1, ranks=1),
    "separate, TP 2": Layout("mux_separate", engine_gpus=2, tensor=2, ranks=1),
    "separate, two replicas": Layout("mux_separate", engine_gpus=2, tensor=1, ranks=1),
    "separate, two ranks": Layout("mux_separate", engine_gpus=1, tensor=1, ranks=2),
    "separate, TP 2, two ranks": Layout("mux_separate", engine_gpus=2, tensor=2, ranks=2),
    "colocated": Layout("mux_colocate", engine_gpus=1, tensor=1, ranks=1),
    "colocated, TP 2, two ranks": Layout("mux_colocate", engine_gpus=2, tensor=2, ranks=2),
    "colocated, two replicas, two ranks": Layout("mux_colocate", engine_gpus=2, tensor=1, ranks=2),
    "separate, Megatron TP 2": Layout("mux_separate", engine_gpus=1, tensor=1, ranks=2, megatron="tensor"),
    "separate, Megatron PP 2": Layout("mux_separate", engine_gpus=1, tensor=1, ranks=2, megatron="pipeline"),
    "colocated, Megatron TP 2": Layout("mux_colocate", engine_gpus=2, tensor=1, ranks=2, megatron="tensor"),
}


def main() -> None:
    folder, names = Path(sys.argv[1]).absolute(), sys.argv[2:] or list(LAYOUTS)
    assets = folder / "assets"
    if not assets.exists():
        assets.mkdir(parents=True)
        tiny.make_assets(assets, hidden=256)
    told = {name: play(LAYOUTS[name], folder, assets, name.replace(", ", "_").replace(" ", "_").lower()) for name in names}
    print(json.dumps(told, indent=2))
    sys.exit(any(it["wrong"] for it in told.values()))


def play(layout: Layout, folder: Path, assets: Path, name: str) -> dict[str, Any]:
    """Runs it; its figures, and what was wrong, a line each."""
    nodes = ["mux.nodes.rollout=[n0]", "mux.nodes.train=[n0]"] if layout.mode == "mux_colocate" else []
    overrides = [*tiny.overrides(assets, STEPS, layout.mode), *_JOB, *layout.overrides()]
    code = tiny.start_job(name, overrides, folder, None, *nodes).wait(_LIMIT_S)
    if code:
        return {"wrong": [f"exit code {code}: {(folder / name / 'job.log').read_text()[-3000:]}"]}
    metrics = list(read_run(layout.mode, 0, folder / name).metrics.values())
    return {**figures(metrics, tiny.events(folder, name)), "wrong": wrong(layout, metrics, folder, name)}


def figures(metrics: Sequence[Mapping[str, float]], trainer: Sequence[dict]) -> dict[str, Any]:
    syncs = [event for event in trainer if event["event"] == events.SYNC]
    return {
        "reward": [step["critic/score/mean"] for step in metrics],
        "correlation": [step["training/rollout_actor_probs_pearson_corr"] for step in metrics],
        "sync_s": [event["duration_sec"] for event in syncs],
        "sync_bytes": [event["extra"]["bytes"] for event in syncs],
    }


def wrong(layout: Layout, metrics: Sequence[Mapping[str, float]], folder: Path, name: str) -> list[str]:
    found = [*weights_agree(metrics, STEPS, _LEAST), *tiny.held_without_lease(folder, name)]
    served = [event for event in tiny.events(folder, name, "server") if event["event"] == events.ENGINE_GENERATE]
    generating = {event["extra"]["replica"] for event in served}
    if generating != set(range(layout.replicas)):
        found.append(f"replicas {sorted(generating)} generated, of {layout.replicas}")
    versions = [event["extra"]["version"] for event in tiny.events(folder, name) if event["event"] == events.SYNC]
    return found if versions == list(range(STEPS)) else [*found, f"syncs of versions {versions}, not one a step"]


if __name__ == "__main__":
    main()
