"""The keys under `mux.*`, checked once at the edge.

The YAML beside this file (`mux/default.yaml`) is what Hydra composes; these dataclasses say what is allowed.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, Literal

import msgspec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mux.config.keys import convert
from verl_mux.config.memory_checks import check_memory
from verl_mux.config.rollout_checks import Surroundings, check_rollout
from verl_mux.config.rollout_keys import RolloutConfig
from verl_mux.coordinator.bus.messages import AUTO
from verl_mux.errors import UserError
from verl_mux.placement.estimator import LEAST
from verl_mux.platform.charges import DeviceSettings
from verl_mux.rollout.engine.record import engines

MODES = ("mux_separate", "mux_colocate")
# Packages of the transports that read the weights out of the other host's memory.
_READERS = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine"}


class NodesConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names of the coordinator's nodes this job was placed on; [auto] on both sides: the coordinator places it."""

    rollout: list[str] = msgspec.field(default_factory=lambda: ["rollout0"])
    train: list[str] = msgspec.field(default_factory=lambda: ["train0"])


class ProfiledConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Seconds of the phases of a few steps of this job, measured before, for the coordinator that places it."""

    rollout: list[float] = msgspec.field(default_factory=list)
    train: list[float] = msgspec.field(default_factory=list)


class ProfileConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The event log. `every`: only steps that are multiples of it. `texts`: share of the requests whose text is logged,
    `text_chars`: of a prompt and of a response, at most. `stalls`: what is written down when an engine stands still again.
    `tables`: of which steps tables go to wandb, where verl logs there: multiples of it; 0: none."""

    enable: bool = True
    dir: str | None = None
    every: int = 1
    texts: float = 0.0
    text_chars: int = 4000
    stalls: Literal["off", "stacks", "trace"] = "stacks"
    tables: int = 10


class SyncConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The weight sync from trainer to rollout workers. `fast_gbps`, `slow_gbps`, `slow_link`: see sync/planning/topology.py."""

    verify: bool = True
    timeout_s: float = 120.0
    streams: int = 2
    method: Literal["auto", "two_stage", "relay", "root", "chain", "pull"] = "auto"
    interface: str | None = None
    fast_gbps: float = 100.0
    slow_gbps: float | None = None
    slow_link: Literal["per_pair", "shared"] = "per_pair"
    delta: bool = False
    transport: Literal["sockets", "nixl", "mooncake"] = "sockets"
    mooncake_protocol: Literal["rdma", "tcp"] = "rdma"
    mooncake_device: str = ""


class MuxConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything under `mux`. See config/mux/default.yaml for what each key means."""

    job: str | None = None
    coordinator: str | None = None
    coordinator_timeout_s: float = 30.0
    keys: str | None = None
    nodes: NodesConfig = msgspec.field(default_factory=NodesConfig)
    slo: float | None = None
    profiled: ProfiledConfig = msgspec.field(default_factory=ProfiledConfig)
    move_note: str | None = None
    seed: int = 0
    seeded_sampling: bool = False
    profile: ProfileConfig = msgspec.field(default_factory=ProfileConfig)
    sync: SyncConfig = msgspec.field(default_factory=SyncConfig)
    device: DeviceSettings = DeviceSettings()
    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)


def load(config: DictConfig) -> MuxConfig:
    """The checked `mux` part of a whole verl config; defaults where there is none. See `check_rollout_keys` for `mux.rollout`.

    Raises:
        UserError: an unknown key or a value of the wrong kind, with what was given and what is allowed.
    """
    mux = convert(_plain(config), MuxConfig, "mux")
    _check_values(mux)
    mux.job = mux.job or str(OmegaConf.select(config, "trainer.experiment_name") or "job")
    return mux


def _plain(config: DictConfig) -> Any:
    """What stands under `mux`, interpolations resolved; names that look like numbers are names all the same."""
    try:
        node = OmegaConf.select(config, "mux")
        given = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise UserError(f"mux: {str(error).splitlines()[0]}") from None
    if not isinstance(given, dict):
        return {} if given is None else given
    if given.get("nodes") == AUTO:
        given["nodes"] = {"rollout": [AUTO], "train": [AUTO]}
    if isinstance(given.get("job"), int):
        given["job"] = str(given["job"])
    if isinstance(given.get("device"), dict) and isinstance(given["device"].get("sleep_level"), int):
        given["device"]["sleep_level"] = str(given["device"]["sleep_level"])
    return given


def _check_values(mux: MuxConfig) -> None:
    for key, seconds in (("coordinator_timeout_s", mux.coordinator_timeout_s), ("sync.timeout_s", mux.sync.timeout_s)):
        if not seconds > 0:
            raise UserError(f"mux.{key} is {seconds}; it must be above 0 seconds")
    for key in ("fast_gbps", "slow_gbps"):
        gbps = getattr(mux.sync, key)
        if gbps is not None and not gbps > 0:
            raise UserError(f"mux.sync.{key} is {gbps}; it must be above 0 Gbit/s")
    if mux.sync.delta and not mux.sync.verify:
        raise UserError("mux.sync.delta=True relies on digests: mux.sync.verify is False and must be True")
    if package := _READERS.get(transport := mux.sync.transport):
        if not mux.sync.verify:
            raise UserError(f"mux.sync.transport={transport} relies on digests: mux.sync.verify is False and must be True")
        if importlib.util.find_spec(transport) is None:
            given = f"mux.sync.transport={transport}"
            raise UserError(f"{given}: the package {package} is not installed here; install it, or use sockets")
    if not 1 <= mux.sync.streams <= 32:
        raise UserError(f"mux.sync.streams is {mux.sync.streams}; it must be between 1 and 32")
    if mux.profile.every < 1:
        raise UserError(f"mux.profile.every is {mux.profile.every}; it must be 1 (all steps) or more")
    if not 0 <= mux.profile.texts <= 1:
        raise UserError(f"mux.profile.texts is {mux.profile.texts:g}; it must be a share of the requests, 0 to 1")
    if not 2 <= mux.profile.text_chars <= 100_000:
        raise UserError(f"mux.profile.text_chars is {mux.profile.text_chars}; it must be 2 to 100000 characters")
    if mux.profile.tables < 0:
        raise UserError(f"mux.profile.tables is {mux.profile.tables}; it must be 0 (never) or more")
    for side in ("rollout", "train"):
        if not getattr(mux.nodes, side):
            raise UserError(f"mux.nodes.{side} is empty; name at least one node of the coordinator, e.g. [{side}0]")
    _check_auto(mux)


def _check_auto(mux: MuxConfig) -> None:
    """Both sides are left to the coordinator, or none."""
    if mux.slo is not None and not mux.slo >= 1:
        raise UserError(f"mux.slo is {mux.slo}; it must be at least 1 (times the iteration alone)")
    counts = len(mux.profiled.rollout), len(mux.profiled.train)
    if counts[0] != counts[1] or 0 < counts[0] < LEAST:
        raise UserError(
            f"mux.profiled has {counts[0]} rollouts and {counts[1]} training phases; as many of both are needed, at least {LEAST}"
        )
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
    if rollout.name not in engines():
        known = " or ".join(engines())
        raise UserError(f"trainer.v1.trainer_mode={mode} needs actor_rollout_ref.rollout.name={known}, given {rollout.name}")
    if mode == "mux_separate" and (rollout.nnodes < 1 or rollout.n_gpus_per_node < 1):
        raise UserError(
            "trainer.v1.trainer_mode=mux_separate needs a rollout pool: set actor_rollout_ref.rollout.nnodes and "
            f".n_gpus_per_node to 1 or more, given {rollout.nnodes} and {rollout.n_gpus_per_node}"
        )
    check_memory(config, mode)
    _check_roles(config, mode)
    _check_replicas(config, mode)
    _check_turns(config, mode, mux)
    check_rollout_keys(config, mux)
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


def _check_roles(config: DictConfig, mode: str) -> None:
    """Roles that hold GPUs outside a job's leases: verl keeps them awake, and no phase of ours covers them."""
    for key in ("reward.reward_model.enable", "reward.reward_model.enable_resource_pool", "distillation.enabled"):
        if OmegaConf.select(config, key):
            raise UserError(
                f"{key}=True is not supported by trainer.v1.trainer_mode={mode}, whose leases do not cover it; allowed: False"
            )


def check_rollout_keys(config: DictConfig, mux: MuxConfig) -> None:
    """Check `mux.rollout` against the rest of the job's config.

    Raises:
        UserError: naming the key, what was given and what is allowed.
    """
    rollout = config.actor_rollout_ref.rollout
    mode = str(config.trainer.v1.trainer_mode)
    at_once = OmegaConf.select(rollout, "max_num_seqs")
    gpus, size = _rollout_gpus(config, mode)
    around = Surroundings(
        trainer_mode=mode,
        train_batch_size=OmegaConf.select(config, "data.train_batch_size") or 1,
        samples_per_group=OmegaConf.select(rollout, "n") or 1,
        max_response_length=OmegaConf.select(config, "data.max_response_length") or sys.maxsize,
        engine_requests=at_once * max(1, gpus // size) if at_once else None,
        rollout_nodes=list(mux.nodes.rollout or []),
        bypasses_old_log_probs=bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")),
    )
    check_rollout(mux.rollout, around)


def _rollout_gpus(config: DictConfig, mode: str) -> tuple[int, int]:
    """GPUs that generate, and GPUs of one replica."""
    rollout = config.actor_rollout_ref.rollout
    side = rollout if mode == "mux_separate" else config.trainer
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    return side.nnodes * side.n_gpus_per_node, size


def _check_replicas(config: DictConfig, mode: str) -> None:
    gpus, size = _rollout_gpus(config, mode)
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
    if mode == "mux_colocate" and mux.coordinator and sorted(mux.nodes.rollout) != sorted(mux.nodes.train):
        raise UserError(
            f"trainer.v1.trainer_mode=mux_colocate runs both phases on the same nodes: mux.nodes.rollout is {mux.nodes.rollout} "
            f"and mux.nodes.train is {mux.nodes.train}; they must be equal"
        )
