"""`python -m bench.sync_rounds [ENGINE ...]`: one of verl's checkpoint engines and ours in turns; JSON on stdout.

Behind `verl-mux bench sync --beside`: in a process of its own, with a Ray of its own. Trainer ranks and rollout workers are the
product's worker classes, which are verl's below; ranks hold the model as FSDP2 shards. What stands in is the inference engine: a
copy of the model for each worker, into which tensors are copied, at once ("memory") or as an engine without a GPU gets them
("engine"): from the file in shared memory of cpu_server_adapter.py with verl's, from the region of region_weights.py with ours.
verl's `naive` loads its engines from within the trainer ranks' processes, ours from within the rollout workers'. Started by
bench/sync/sync_bench.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict
from safetensors import safe_open
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import RayResourcePool
from verl.utils.config import omega_conf_to_dataclass

from bench.memory_cycles import make_model
from bench.sync_rounds.workers import WAYS, Rank, Worker
from verl_mux.config.completion import complete, hand_to_workers
from verl_mux.config.schema import MuxConfig, ProfileConfig
from verl_mux.sync.engine import MuxCheckpointManager

_RAY = {"address": "local", "num_cpus": 64, "include_dashboard": False, "object_store_memory": 80_000_000, "log_to_driver": False}
# Of each way, before those that count: groups are built, memory is mapped.
_FIRST = 1


class _Replica(SimpleNamespace):
    """Of one rollout worker. What verl's manager asks of an engine that serves, this one has nothing to do for."""

    def __getattr__(self, name: str) -> Callable:
        async def nothing(**_: Any) -> None:
            return None

        return nothing


class Fleet:
    """`ranks` trainer ranks, as many rollout workers, and a manager of each kind."""

    def __init__(self, model: Path, ranks: int, backend: str) -> None:
        config = _config(model, ranks)
        role, self._backend = config.actor_rollout_ref, backend
        rank = RayClassWithInitArgs(cls=ray.remote(Rank), config=role, role="actor_rollout")
        self._ranks = _group(rank, ranks)
        self._ranks.init_model()
        rollout, model_config = omega_conf_to_dataclass(role.rollout), omega_conf_to_dataclass(role.model)
        workers = [
            _group(RayClassWithInitArgs(ray.remote(Worker), rollout, model_config, replica_rank=at), 1) for at in range(ranks)
        ]
        self._workers = workers
        replicas = [_Replica(workers=group.workers) for group in workers]
        ours = omega_conf_to_dataclass(role.rollout.checkpoint_engine)
        theirs = omega_conf_to_dataclass(_with_backend(role.rollout.checkpoint_engine, backend))
        self._managers = {
            "theirs": CheckpointEngineManager(theirs, self._ranks, replicas),
            "ours": MuxCheckpointManager(ours, self._ranks, replicas),
        }

    def round(self, whose: str, way: str, version: int) -> tuple[float, bool]:
        """Seconds of one sync, and whether every engine then has every bit of it."""
        backend = "mux" if whose == "ours" else self._backend
        for group in (self._ranks, *self._workers):
            group.consume(way, backend)
        wanted = set(self._ranks.step())
        began = time.perf_counter()
        self._managers[whose].update_weights(version)
        seconds = time.perf_counter() - began
        holders = [self._ranks] if backend == "naive" else self._workers
        return seconds, {held for group in holders for held in group.digest()} == wanted


def _group(of: RayClassWithInitArgs, count: int) -> RayWorkerGroup:
    return RayWorkerGroup(RayResourcePool([count], use_gpu=False, max_colocate_count=1), of, device_name="cpu")


def _with_backend(config: DictConfig, backend: str) -> DictConfig:
    changed = config.copy()
    changed.backend = backend
    return changed


def _config(model: Path, ranks: int) -> DictConfig:
    """Of a job with an engine for each trainer rank, in fp32 on both sides: all ways then move as many bytes."""
    keys = {
        "rollout.name": "sglang", "rollout.dtype": "float32", "rollout.tensor_model_parallel_size": 1, "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": ranks, "rollout.log_prob_micro_batch_size_per_gpu": 1, "model.path": model,
        "+model.load_tokenizer": False, "actor.strategy": "fsdp2", "actor.ppo_mini_batch_size": ranks,
        "actor.ppo_micro_batch_size_per_gpu": 1,
    }  # fmt: skip
    names = [f"{key[0] if key[0] == '+' else ''}actor_rollout_ref.{key.lstrip('+')}={value}" for key, value in keys.items()]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", names)
    config.trainer.v1.trainer_mode = "mux_separate"
    mux = MuxConfig(profile=ProfileConfig(enable=False))
    complete(config, mux, cpu=True)
    hand_to_workers(config, mux, cpu=True)
    with open_dict(config):
        # Engines do not sleep here, and states do not leave: a sync alone is timed.
        config.actor_rollout_ref.rollout.free_cache_engine = False
        config.actor_rollout_ref.actor.fsdp_config.param_offload = False
    return config


def measure(backend: str, model_bytes: int, ranks: int, rounds: int) -> dict[str, Any]:
    """By way: seconds of each sync of theirs and of ours, in turns; bit_equal: of all syncs.

    Raises: whatever keeps `backend` from running here.
    """
    with tempfile.TemporaryDirectory(prefix="verl_mux_sync_", dir="/dev/shm") as folder:
        make_model(Path(folder), model_bytes // 4)
        moved = _model_bytes(Path(folder))
        ray.init(**_RAY)
        try:
            fleet = Fleet(Path(folder), ranks, backend)
            result: dict[str, Any] = {"model_bytes": moved, "bit_equal": True, "ways": {}}
            version = 0
            for way in WAYS:
                seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
                for _ in range(_FIRST + rounds):
                    for whose, took in seconds.items():
                        version += 1
                        each, equal = fleet.round(whose, way, version)
                        took.append(each)
                        result["bit_equal"] = result["bit_equal"] and equal
                result["ways"][way] = {whose: took[_FIRST:] for whose, took in seconds.items()}
            return result
        finally:
            ray.shutdown()


def _model_bytes(folder: Path) -> int:
    """As the file has it: tied weights once."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


def engines() -> dict[str, str | None]:
    """verl's, by name: None, or why it cannot even be imported here."""
    there: dict[str, str | None] = {name: None for name in CheckpointEngineRegistry._registry if name != "mux"}
    missing = CheckpointEngineRegistry._import_errors.items()
    return there | {module.removesuffix("_checkpoint_engine"): str(error) for module, error in missing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", nargs="?", help="without it: verl's engines, and what each lacks here")
    parser.add_argument("--model-bytes", type=int, default=256 << 20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.engine is None:
        print(json.dumps(engines()))
        return
    print(json.dumps(measure(given.engine, given.model_bytes, given.ranks, given.rounds)))


if __name__ == "__main__":
    main()
