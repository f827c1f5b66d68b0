"""The keys under `mux.*`, checked once at the edge.

The YAML beside this file (`mux/default.yaml`) is what Hydra composes; these dataclasses say what is allowed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from verl_mux.coordinator.messages import AUTO
from verl_mux.errors import UserError
from verl_mux.rollout.config import RolloutConfig
from verl_mux.rollout.config import defaults as rollout_defaults
from verl_mux.rollout.config import load as load_rollout
from verl_mux.rollout.config_checks import Surroundings

MODES = ("mux_separate", "mux_colocate")


@dataclass
class NodesConfig:
    """Names of the coordinator's nodes this job was placed on; [auto] on both sides: the coordinator places it."""

    rollout: list[str] = field(default_factory=lambda: ["rollout0"])
    train: list[str] = field(default_factory=lambda: ["train0"])


@dataclass
class ProfileConfig:
    """The event log. `every`: only steps that are multiples of it."""

    enable: bool = True
    dir: str | None = None
    every: int = 1


@dataclass
class SyncConfig:
    """The weight sync between trainer and rollout workers."""

    verify: bool = True
    timeout_s: float = 600.0


@dataclass
class MuxConfig:
    """Everything under `mux`. See config/mux/default.yaml for what each key means."""

    job: str | None = None
    coordinator: str | None = None
    coordinator_timeout_s: float = 30.0
    nodes: NodesConfig = field(default_factory=NodesConfig)
    slo: float | None = None
    seed: int = 0
    seeded_sampling: bool = False
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    # As given; `check` turns it into verl_mux.rollout.config.RolloutConfig.
    rollout: dict[str, Any] = field(default_factory=rollout_defaults)


_SECTIONS = {"nodes": NodesConfig, "profile": ProfileConfig, "sync": SyncConfig}


def load(config: DictConfig) -> MuxConfig:
    """The checked `mux` part of a whole verl config; defaults where there is none.

    Raises:
        UserError: an unknown key or a value of the wrong kind, with what was given and what is allowed.
    """
    given = _plain(config)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(MuxConfig), given)
    except ConfigKeyError as error:
        raise UserError(_unknown_key(error)) from None
    except OmegaConfBaseException as error:
        raise UserError(_wrong_kind(given, error)) from None
    mux: MuxConfig = OmegaConf.to_object(merged)
    _check_values(mux)
    mux.job = mux.job or str(OmegaConf.select(config, "trainer.experiment_name") or "job")
    return mux


def _plain(config: DictConfig) -> dict[str, Any]:
    """What stands under `mux`, interpolations resolved, with a mapping wherever keys are expected."""
    try:
        node = OmegaConf.select(config, "mux")
        given = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise UserError(f"mux: {str(error).splitlines()[0]}") from None
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise UserError(f"mux is {given!r}; it holds the keys {_keys(MuxConfig)}")
    if not isinstance(given.get("rollout", {}), dict):
        raise UserError(f"mux.rollout must hold keys, given {given['rollout']!r}")
    if given.get("nodes") == AUTO:
        given["nodes"] = {"rollout": [AUTO], "train": [AUTO]}
    for name, section in _SECTIONS.items():
        if name in given and not isinstance(given[name], dict):
            raise UserError(f"mux.{name} is {given[name]!r}; it holds the keys {_keys(section)}")
    return given


def _check_values(mux: MuxConfig) -> None:
    for key, seconds in (("coordinator_timeout_s", mux.coordinator_timeout_s), ("sync.timeout_s", mux.sync.timeout_s)):
        if not seconds > 0:
            raise UserError(f"mux.{key} is {seconds}; it must be above 0 seconds")
    if mux.profile.every < 1:
        raise UserError(f"mux.profile.every is {mux.profile.every}; it must be 1 (all steps) or more")
    for side in ("rollout", "train"):
        if not getattr(mux.nodes, side):
            raise UserError(f"mux.nodes.{side} is empty; name at least one node of the coordinator, e.g. [{side}0]")
    _check_auto(mux)


def _check_auto(mux: MuxConfig) -> None:
    """Both sides are left to the coordinator, or none."""
    if mux.slo is not None and not mux.slo >= 1:
        raise UserError(f"mux.slo is {mux.slo}; it must be at least 1 (times the iteration alone)")
    if AUTO not in (*mux.nodes.rollout, *mux.nodes.train):
        return
    if mux.nodes.rollout != [AUTO] or mux.nodes.train != [AUTO]:
        raise UserError(
            f"mux.nodes.rollout is {mux.nodes.rollout} and mux.nodes.train is {mux.nodes.train}; the coordinator chooses both"
            " (mux.nodes=auto) or none"
        )
    if not mux.coordinator:
        raise UserError("mux.nodes=auto leaves the nodes to a coordinator, but mux.coordinator is not set")


def check(config: DictConfig) -> MuxConfig | None:
    """Check a verl config that asks for one of our trainer modes; None for any other.

    Raises:
        UserError: naming the key, what was given and what is allowed.
    """
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    if not str(mode).startswith("mux_"):
        return None
    if mode not in MODES:
        raise UserError(f"trainer.v1.trainer_mode={mode} is unknown; ours are {', '.join(MODES)}")
    mux = load(config)
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "sglang":
        raise UserError(f"trainer.v1.trainer_mode={mode} needs actor_rollout_ref.rollout.name=sglang, given {rollout.name}")
    if mode == "mux_separate" and (rollout.nnodes < 1 or rollout.n_gpus_per_node < 1):
        raise UserError(
            "trainer.v1.trainer_mode=mux_separate needs a rollout pool: set actor_rollout_ref.rollout.nnodes and "
            f".n_gpus_per_node to 1 or more, given {rollout.nnodes} and {rollout.n_gpus_per_node}"
        )
    model = OmegaConf.select(config, "actor_rollout_ref.model") or {}
    if model.get("lora_rank", 0) and not (model.get("lora") or {}).get("merge", False):
        raise UserError(
            f"trainer.v1.trainer_mode={mode} syncs whole weights: actor_rollout_ref.model.lora_rank={model['lora_rank']} needs "
            "actor_rollout_ref.model.lora.merge=true"
        )
    _check_replicas(config, mode)
    _check_turns(config, mode, mux)
    mux.rollout = rollout_config(config, mux)
    if mux.rollout.controlled and OmegaConf.select(config, "actor_rollout_ref.rollout.enable_rollout_routing_replay"):
        raise UserError(
            "mux.rollout.oversample and mux.rollout.segments do not keep routed experts: "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay must be False"
        )
    if mux.rollout.controlled and OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path"):
        raise UserError(
            "mux.rollout.oversample, segments and migration choose the batch themselves: trainer.v1.sampler.custom_sampler.path "
            "must be null"
        )
    if config.algorithm.get("filter_groups", None) and config.algorithm.filter_groups.enable:
        raise UserError(f"algorithm.filter_groups.enable=True is not supported by trainer.v1.trainer_mode={mode}; use sync")
    return mux


def rollout_config(config: DictConfig, mux: MuxConfig) -> RolloutConfig:
    """The checked `mux.rollout`, against the rest of the job's config.

    Raises:
        UserError: naming the key, what was given and what is allowed.
    """
    rollout = config.actor_rollout_ref.rollout
    mode = str(config.trainer.v1.trainer_mode)
    at_once = OmegaConf.select(rollout, "max_num_seqs")
    around = Surroundings(
        trainer_mode=mode,
        train_batch_size=OmegaConf.select(config, "data.train_batch_size") or 1,
        samples_per_group=OmegaConf.select(rollout, "n") or 1,
        max_response_length=OmegaConf.select(config, "data.max_response_length") or sys.maxsize,
        engine_requests=at_once * _replicas(config, mode) if at_once else None,
        rollout_nodes=list(mux.nodes.rollout or []),
        bypasses_old_log_probs=bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")),
    )
    return load_rollout(mux.rollout, around)


def _replicas(config: DictConfig, mode: str) -> int:
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    side = rollout if mode == "mux_separate" else config.trainer
    return max(1, side.nnodes * side.n_gpus_per_node // size)


def _check_replicas(config: DictConfig, mode: str) -> None:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    side = rollout if mode == "mux_separate" else trainer
    gpus = side.nnodes * side.n_gpus_per_node
    if gpus % size:
        raise UserError(
            f"actor_rollout_ref.rollout: {gpus} rollout GPUs cannot hold replicas of {size} GPUs (tensor x data x pipeline "
            "parallel size); the number of GPUs must be a multiple of it"
        )


def _check_turns(config: DictConfig, mode: str, mux: MuxConfig) -> None:
    """Refuse what contradicts the mode: phases that follow one another, on weights of the step before."""
    updates = OmegaConf.select(config, f"trainer.v1.{mode}.parameter_sync_step")
    if updates not in (None, 1):
        raise UserError(f"trainer.v1.{mode}.parameter_sync_step is {updates}; {mode} is strictly on-policy, 1 is allowed")
    if mode == "mux_colocate" and mux.nodes.rollout == [AUTO]:
        raise UserError("mux.nodes=auto places jobs with two pools: trainer.v1.trainer_mode=mux_colocate must name its nodes")
    if mode == "mux_colocate" and mux.coordinator and sorted(mux.nodes.rollout) != sorted(mux.nodes.train):
        raise UserError(
            f"trainer.v1.trainer_mode=mux_colocate runs both phases on the same nodes: mux.nodes.rollout is {mux.nodes.rollout} "
            f"and mux.nodes.train is {mux.nodes.train}; they must be equal"
        )


def _keys(section: type) -> str:
    return ", ".join(section.__dataclass_fields__)


def _section_of(path: list[str]) -> type:
    return _SECTIONS.get(path[0], MuxConfig) if len(path) > 1 else MuxConfig


def _unknown_key(error: ConfigKeyError) -> str:
    path = (error.full_key or str(error.key)).split(".")
    return f"unknown key mux.{'.'.join(path)}; allowed here: {_keys(_section_of(path))}"


def _wrong_kind(given: dict[str, Any], error: OmegaConfBaseException) -> str:
    key = error.full_key.partition("[")[0]
    path = key.split(".")
    value = OmegaConf.select(OmegaConf.create(given), key)
    return f"mux.{key} is {value!r}; allowed: {_section_of(path).__dataclass_fields__[path[-1]].type}"
