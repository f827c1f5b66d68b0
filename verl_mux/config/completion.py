"""Complete a verl config: what our trainer modes imply, what a platform without GPU needs, and the settings of the workers. And
say of a config what a start would refuse and change.

Runs in the job's driver: called by trainer/modes.py, and by preflight.py for verl's own modes; changes the config in place.
`judge` runs on the command line, called by launcher/doctor.py; it reads what job_checks.py reads.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_mux import plugin
from verl_mux.config.job_checks import (
    MEGATRON,
    engine_of,
    model_config,
    own_engines,
    read_mux,
    refused,
    refused_surroundings,
    serves_adapter,
    untried,
)
from verl_mux.config.schema import MuxConfig, RolloutConfig, leaves
from verl_mux.errors import UserError
from verl_mux.places.place import Place
from verl_mux.platform.choose import cpu_part
from verl_mux.rollout.control.segments import TIS_THRESHOLD
from verl_mux.rollout.engine.record import Arguments, engines
from verl_mux.worker_settings import KEY, WorkerSettings

logger = logging.getLogger(__name__)

# verl's default, which the user did not choose. An engine loads one bucket while the next is on its way.
_DEFAULT_BUCKET_MB, _OUR_BUCKET_MB = 2048, 256


def complete(config: DictConfig, mux: MuxConfig, cpu: bool) -> None:
    """Everything below, in order, of a config that job_checks.py accepts."""
    with open_dict(config):
        _imply_mode(config)
        _imply_memory(config)
        _imply_engine(config, mux)
        _imply_rollout(config, mux.rollout)
        for role in own_engines(config):  # verl lets a reward model sleep at the start, and on GPUs of its own nothing wakes it
            role.free_cache_engine = False
        if cpu:
            _imply_cpu(config)


def complete_stock_cpu(config: DictConfig) -> None:
    """What verl's own trainer modes need without GPU. Nothing sleeps there: the engine keeps its memory."""
    with open_dict(config):
        _imply_cpu(config)
        rollout = config.actor_rollout_ref.rollout
        rollout.free_cache_engine = False
        # verl's engines for trainers and rollout workers apart from each other all need GPUs.
        if config.trainer.v1.trainer_mode == "separate_async" and rollout.checkpoint_engine.backend == "naive":
            rollout.checkpoint_engine.backend = "mux"
        if engine := engine_of(config):
            _imply_arguments(rollout, {**engine.arguments, **engine.stock_cpu_arguments})


def complete_trigger(config: DictConfig) -> None:
    """The training trigger is a custom sampler of verl's. Raises UserError where the config names another one."""
    sampler = config.trainer.v1.sampler
    if given := OmegaConf.select(sampler, "custom_sampler.path"):
        raise UserError(
            f"mux.rollout.trigger.n_min is a sampler itself: trainer.v1.sampler.custom_sampler.path={given} must be null"
        )
    with open_dict(config):
        sampler.custom_sampler = plugin.TRIGGERED_BUFFER


def hand_to_workers(
    config: DictConfig, mux: MuxConfig, places: Mapping[str, Place] | None = None, cpu: bool = False, resume: str | None = None
) -> WorkerSettings:
    """Put what workers need into verl's extension point; returns it.

    `places`: of the job's nodes; `cpu`: work stays on the cores that these name; `resume`: the checkpoint to go on from.
    """
    first = {side: (places or {}).get(getattr(mux.nodes, side)[0], Place()) for side in ("rollout", "train")}
    cores = {side: tuple(place.cpus or ()) if cpu else () for side, place in first.items()}
    events_dir = str(Path(mux.profile.dir or Path(config.trainer.default_local_dir) / "events").absolute())
    settings = WorkerSettings(
        job=str(mux.job),
        uid=uuid4().hex[:12],
        seed=mux.seed,
        seeded_sampling=mux.seeded_sampling,
        events_dir=events_dir if mux.profile.enable else None,
        events_every=mux.profile.every,
        texts=mux.profile.texts,
        stalls=mux.profile.stalls,
        rollout_nodes=tuple(mux.nodes.rollout),
        train_nodes=tuple(mux.nodes.train),
        rollout_cpus=cores["rollout"],
        train_cpus=cores["train"],
        places=dict(places or {}),
        resume=resume,
        device=mux.device,
    )
    with open_dict(config):
        custom = dict(config.actor_rollout_ref.rollout.get("custom") or {})
        config.actor_rollout_ref.rollout.custom = {**custom, KEY: settings.to_dict()}
    return settings


# Keys of a job that its event log records: the report's advice reasons about them.
_LOGGED = {
    "trainer": ("v1.trainer_mode", "v1.sampler.max_off_policy_threshold", "nnodes", "n_gpus_per_node"),
    "data": ("train_batch_size", "max_prompt_length", "max_response_length"),
    "actor_rollout_ref.rollout": ("n", "nnodes", "n_gpus_per_node", "tensor_model_parallel_size", "max_num_seqs"),
}


def logged_keys(config: DictConfig) -> list[str]:
    """`key=value` of the keys above and of all under mux.rollout but the trigger's, where they are set and not null."""
    theirs, ours = [f"{part}.{key}" for part, keys in _LOGGED.items() for key in keys], leaves(RolloutConfig, "mux.rollout")
    values = {key: OmegaConf.select(config, key) for key in (*theirs, *ours) if ".trigger." not in key}
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def _imply_mode(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    config.actor_rollout_ref.hybrid_engine = False
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        # FSDP2's row shards sleep on the host and are sent from there; FSDP1 would gather on GPUs that others hold by then.
        role.strategy = "fsdp2" if role.strategy == "fsdp" else role.strategy
    if config.trainer.v1.trainer_mode == "mux_colocate":
        rollout.nnodes, rollout.n_gpus_per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    rollout.checkpoint_engine.backend = "mux"
    rollout.agent.agent_loop_manager_class = plugin.AGENT_LOOP_MANAGER
    if not OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path"):  # the user's own stays
        config.trainer.v1.sampler.custom_sampler = plugin.REPLAY_BUFFER


def _imply_memory(config: DictConfig) -> None:
    """A job without a lease holds nothing on the device, so nothing may be kept there between phases."""
    config.actor_rollout_ref.rollout.free_cache_engine = True
    buckets = config.actor_rollout_ref.rollout.checkpoint_engine
    if buckets.get("update_weights_bucket_megabytes") == _DEFAULT_BUCKET_MB:
        buckets.update_weights_bucket_megabytes = _OUR_BUCKET_MB
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        engines = (role.get(MEGATRON), role.get("fsdp_config"), role.get("fsdp"), (role.get("model") or {}).get("fsdp_config"))
        for engine in filter(None, engines):
            engine.update({key: True for key in ("param_offload", "optimizer_offload") if key in engine})


def _imply_engine(config: DictConfig, mux: MuxConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if record := engine_of(config):
        _imply_arguments(rollout, {**record.arguments, **(record.lora_arguments if serves_adapter(config) else {})})
    if serves_adapter(config) and "dummy" in str(rollout.load_format):
        rollout.load_format = "auto"  # the base weights are those of the model's files
    engine = rollout.checkpoint_engine
    kwargs = OmegaConf.to_container(engine.get("engine_kwargs") or OmegaConf.create({}))
    kwargs["mux"] = {**msgspec.to_builtins(mux.sync), **kwargs.get("mux", {})}
    engine.engine_kwargs = kwargs


def _imply_rollout(config: DictConfig, keys: RolloutConfig) -> None:
    if keys.needs_rollout_log_probs:
        config.actor_rollout_ref.rollout.calculate_log_probs = True
    if keys.cuts and keys.segments.treatment == "tis":
        correction = config.algorithm.rollout_correction
        if correction.get("rollout_is") is None:  # else the user has asked verl's own rollout correction for something already
            correction.rollout_is, correction.rollout_is_threshold = "token", TIS_THRESHOLD
    if keys.launch_order != "fifo" and (record := engine_of(config)):
        rollout = config.actor_rollout_ref.rollout
        _imply_arguments(rollout, record.priority_arguments(_engine_kwargs(rollout)))


def _imply_cpu(config: DictConfig) -> None:
    config.trainer.device = "cpu"
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    for role in (actor, config.actor_rollout_ref.ref, config.critic):
        if role.get("strategy") == MEGATRON:
            role.megatron.vanilla_mbridge = True  # Megatron-Bridge needs Transformer Engine, which needs CUDA
    for role in (actor, config.actor_rollout_ref.ref):
        role.use_torch_compile = False
        if role.strategy == MEGATRON:
            continue
        role.strategy = "fsdp2"
        role.fsdp_config.use_torch_compile = False
        if not cpu_part("has_bf16_products")() and not role.fsdp_config.get("mixed_precision"):
            role.fsdp_config.mixed_precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    config.actor_rollout_ref.model.use_remove_padding = False
    overrides = dict(config.actor_rollout_ref.model.get("override_config") or {})
    config.actor_rollout_ref.model.override_config = {"attn_implementation": "sdpa", **overrides}
    rollout.enforce_eager = True
    if record := engine_of(config):
        _imply_arguments(rollout, record.cpu_arguments)
    logger.info("no accelerator: %s runs with %s", rollout.name, dict(_engine_kwargs(rollout)))
    for role in own_engines(config):
        if record := engines().get(str(OmegaConf.select(role, "name"))):
            _imply_arguments(role, {**record.cpu_arguments, **record.stock_cpu_arguments})


def _engine_kwargs(rollout: DictConfig) -> DictConfig:
    if not rollout.get("engine_kwargs"):
        rollout.engine_kwargs = {}
    if not rollout.engine_kwargs.get(rollout.name):
        rollout.engine_kwargs[rollout.name] = {}
    return rollout.engine_kwargs[rollout.name]


def _imply_arguments(rollout: DictConfig, arguments: Arguments) -> None:
    """Give the engine of this section these beside the user's own arguments, which win; lists are added to the user's."""
    given = _engine_kwargs(rollout)
    for key, value in arguments.items():
        if isinstance(value, list):
            given[key] = list(dict.fromkeys([*(given.get(key) or []), *value]))
        else:
            given.setdefault(key, value)


# ---------------------------------------------------------------- what a start would make of a config

_SECTIONS = (
    "data", "algorithm.rollout_correction", "trainer.v1.sampler", "critic", *(f"actor_rollout_ref.{role}" for role in (
    "actor", "ref", "model", "rollout.agent", "rollout.checkpoint_engine"))
)  # fmt: skip
# Where these are left out, nothing is wrong.
_PARTS = tuple(f"actor_rollout_ref.{part}" for part in (
    "actor.fsdp_config", "ref.fsdp_config", "actor.megatron", "ref.megatron", "rollout.engine_kwargs",
    "rollout.checkpoint_engine.engine_kwargs",
    *(f"rollout.engine_kwargs.{name}" for name in plugin.ENGINES),
))  # fmt: skip
_MODE, _POOL = "trainer.v1.trainer_mode", "actor_rollout_ref.rollout"


def judge(given: DictConfig, where: str) -> dict[str, Any]:
    """What a start of this config would refuse, change, and be the first to try: accepted, refusals, changes, untried.

    A config of another trainer mode is judged as `mux_separate`, with a rollout pool like its training pool if it has none.
    `where`: names the config in errors. Raises UserError: it is no whole config of verl's.
    """
    config = copy.deepcopy(given)
    try:
        for section in (*_SECTIONS, *_PARTS):
            found = OmegaConf.select(config, section)
            if not OmegaConf.is_dict(found) and (found is not None or section in _SECTIONS):
                raise UserError(f"{where} is no whole config of verl's: {section} is {found!r}; keys are needed there")
        with open_dict(config):
            if not str(OmegaConf.select(config, _MODE)).startswith("mux_"):
                config.trainer.v1.trainer_mode = "mux_separate"
                if not OmegaConf.select(config, f"{_POOL}.nnodes"):
                    for key in ("nnodes", "n_gpus_per_node"):
                        config.actor_rollout_ref.rollout[key] = OmegaConf.select(config, f"trainer.{key}")
        yours, model = copy.deepcopy(config), model_config(config)
        refusals = [*refused(config), *refused_surroundings(config, model)]
        new = list(untried(config, model))
        complete(config, read_mux(config)[0], OmegaConf.select(config, "trainer.device") == "cpu")
        changes = list(_changes(given, yours, config))
    except OmegaConfBaseException as error:
        raise UserError(f"{where}: {str(error).splitlines()[0]}") from None
    return {
        "accepted": not refusals,
        "refusals": [{"key": found.key, "given": _plain(found.given), "reason": str(found)} for found in refusals],
        "changes": changes,
        "untried": [{"key": key, "given": _plain(value), "reason": why} for key, value, why in new],
    }


def _changes(given: DictConfig, yours: DictConfig, config: DictConfig) -> Iterator[dict[str, Any]]:
    """From what is given over what its user sets for our modes to what a start makes of it."""
    before, after = (dict(_values(OmegaConf.to_container(part), "")) for part in (given, config))
    for key, value in after.items():
        # What `mux.sync` says goes to verl's engine once more.
        if before.get(key) == value or ".checkpoint_engine.engine_kwargs.mux." in key:
            continue
        was, set_by_you, now = (_plain(OmegaConf.select(part, key)) for part in (given, yours, config))
        if was != now:
            yield {"key": key, "given": was, "to": now, "reason": "you set it" if set_by_you == now else "verl_mux sets it"}


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(key with dots, value), interpolations as they stand."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, part in value.items():
        yield from _values(part, f"{path}.{key}" if path else str(key))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
