"""Refuse a job's config where keys contradict one another, a trainer mode, or what a sleeping job must not keep on its device.

Runs in the job's driver before Ray starts (preflight.py) and in `verl-mux doctor --job`; reads a config and the model's config
file, and writes nothing. A start raises the first refusal. Each names the key, its value and the way out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.specifiers import SpecifierSet

from verl_mux.config.rollout_checks import MODES, Surroundings, refused_rollout
from verl_mux.config.schema import MuxConfig, Refusal, convert, raise_first, wrong_keys
from verl_mux.coordinator.bus.messages import AUTO
from verl_mux.memory.model_files import known_model_config
from verl_mux.placement.estimator import LEAST
from verl_mux.platform.choose import accelerator_present, cpu_platform_wanted
from verl_mux.platform.cuda_packages import FLASH_ATTENTION, has_flash_attention, hub_has_flash_attention, torch_cuda
from verl_mux.rollout.engine.record import NO_DRAFTS, NO_SCALES, EngineRecord, engines, is_installed
from verl_mux.upstream import SUPPORTED

_MODE = "trainer.v1.trainer_mode"
_ROLLOUT = "actor_rollout_ref.rollout"
_FILTER = "algorithm.filter_groups"
_REWARD, _TEACHERS = "reward.reward_model", "distillation"


def check(config: DictConfig) -> MuxConfig | None:
    """Check a verl config that asks for one of our trainer modes; None for any other. Raises Refusal: the first of `refused`."""
    if not str(OmegaConf.select(config, _MODE)).startswith("mux_"):
        return None
    raise_first(refused(config))
    return load(config)


def refused(config: DictConfig) -> Iterator[Refusal]:
    """All that a config which asks for one of our trainer modes is refused for."""
    mode = str(OmegaConf.select(config, _MODE))
    if mode not in MODES:
        yield Refusal(f"{_MODE}={mode} is unknown; ours are {', '.join(MODES)}", _MODE, mode)
        return
    mux, wrong = read_mux(config)
    yield from wrong
    name = OmegaConf.select(config, f"{_ROLLOUT}.name")
    if name not in engines():
        needed = f"{_MODE}={mode} needs {_ROLLOUT}.name={' or '.join(engines())}, given {name}"
        yield Refusal(needed, f"{_ROLLOUT}.name", name)
    yield from refused_numbers(config)
    yield from _refused_sizes(config, mode)
    unsupported = f"is not supported by {_MODE}={mode}"
    yield from _refused_reward_model(config, unsupported)
    if OmegaConf.select(config, key := f"{_TEACHERS}.enabled") and (why := getattr(engines().get(name), "no_teacher", "")):
        yield Refusal(f"{key}=True does not go with {_ROLLOUT}.name={name}: {why}; allowed: vllm", key, True)
    yield from _refused_filter(config)
    yield from _refused_memory(config, mode, unsupported)
    backend = f"{_ROLLOUT}.checkpoint_engine.backend"
    if (given := OmegaConf.select(config, backend)) not in (None, "naive", "mux"):  # naive: verl's own default
        why = f"{_MODE}={mode} syncs while no trainer holds a GPU, and {given} gathers the weights on them"
        yield Refusal(f"{backend} is {given!r}: {why}; leave it out, or set mux", backend, given)
    if OmegaConf.select(config, "trainer.use_v1") is False:
        legacy = f"trainer.use_v1=False starts verl's legacy trainer, which does not know {_MODE}={mode}; allowed: True"
        yield Refusal(legacy, "trainer.use_v1", False)
    step = f"trainer.v1.{mode}.parameter_sync_step"
    if (updates := OmegaConf.select(config, step)) not in (None, 1):
        yield Refusal(f"{step} is {updates}; {mode} is strictly on-policy, 1 is allowed", step, updates)
    if mode == "mux_colocate" and mux.coordinator and sorted(mux.nodes.rollout) != sorted(mux.nodes.train):
        both = f"mux.nodes.rollout is {mux.nodes.rollout} and mux.nodes.train is {mux.nodes.train}; they must be equal"
        yield Refusal(f"{_MODE}={mode} runs both phases on the same nodes: {both}", "mux.nodes.rollout", mux.nodes.rollout)
    yield from refused_rollout_keys(config, mux)
    if mux.rollout.controlled:
        ours = "does not go with mux.rollout's order, moves, over-sampling and segments, which"
        routing, sampler = f"{_ROLLOUT}.enable_rollout_routing_replay", "trainer.v1.sampler.custom_sampler.path"
        yield from _forbid(config, [routing], f"{ours} do not keep routed experts", "False")
        yield from _forbid(config, [sampler], f"{ours} choose the batch themselves", "null")


def _refused_reward_model(config: DictConfig, unsupported: str) -> Iterator[Refusal]:
    if not OmegaConf.select(config, key := f"{_REWARD}.enable"):
        return
    if not OmegaConf.select(config, f"{_REWARD}.enable_resource_pool"):
        own = f"{_REWARD}.enable_resource_pool=True gives it GPUs of its own ({_REWARD}.nnodes, n_gpus_per_node)"
        yield Refusal(f"{key}=True {unsupported} on the trainer's GPUs, whose leases do not cover it; {own}", key, True)
    if OmegaConf.select(config, function := "reward.custom_reward_function.path") is None:
        why = "verl 0.9.1's agent loop fails on the answer of a model that gives a number, in verl's own modes too"
        yield Refusal(f"{key}=True without {function}: {why}; needed: a function that asks the model for text", function, None)


def _filters(config: DictConfig) -> bool:
    return bool(OmegaConf.select(config, f"{_FILTER}.enable"))


def _refused_filter(config: DictConfig) -> Iterator[Refusal]:
    if _filters(config) and not (metric := OmegaConf.select(config, f"{_FILTER}.metric")):
        line = f"{_FILTER}.metric is {metric!r}; needed: reward, or a key of what the reward function returns, such as acc"
        yield Refusal(line, f"{_FILTER}.metric", metric)


def _forbid(config: DictConfig, keys: Iterable[str], why: str, allowed: str) -> Iterator[Refusal]:
    """Refuse each of these keys that is set to something true."""
    for key in keys:
        if value := OmegaConf.select(config, key):
            yield Refusal(f"{key}={value} {why}; allowed: {allowed}", key, value)


def load(config: DictConfig) -> MuxConfig:
    """Return the `mux` part of a whole verl config, with defaults where there is none. Raises Refusal: an unknown key, a value
    that is not possible, or keys that contradict one another."""
    mux, wrong = read_mux(config)
    raise_first(wrong)
    return mux


def read_mux(config: DictConfig) -> tuple[MuxConfig, list[Refusal]]:
    """The `mux` part and what is wrong with it; with wrong keys, the defaults."""
    try:
        values = _plain(config)
    except Refusal as refusal:
        return MuxConfig(), [refusal]
    if wrong := list(wrong_keys(values, MuxConfig, "mux")):
        return MuxConfig(), wrong
    mux = convert(values, MuxConfig, "mux")
    mux.job = mux.job or str(OmegaConf.select(config, "trainer.experiment_name") or "job")
    return mux, list(_contradictions(mux))


def _contradictions(mux: MuxConfig) -> Iterator[Refusal]:
    transport, key = mux.sync.transport, "mux.sync.transport"
    if transport != "sockets":
        if not mux.sync.verify:
            line = f"{key}={transport} relies on digests: mux.sync.verify is False and must be True"
            yield Refusal(line, "mux.sync.verify", False)
        if importlib.util.find_spec(transport) is None:
            missing = f"the package {transport} is not installed here; install it, or use sockets"
            yield Refusal(f"{key}={transport}: {missing}", key, transport)
    for side in ("rollout", "train"):
        if not getattr(mux.nodes, side):
            empty = f"mux.nodes.{side} is empty; name at least one node of the coordinator, e.g. [{side}0]"
            yield Refusal(empty, f"mux.nodes.{side}", [])
    counts = len(mux.profiled.rollout), len(mux.profiled.train)
    if counts[0] != counts[1] or 0 < counts[0] < LEAST:
        given = f"mux.profiled has {counts[0]} rollouts and {counts[1]} training phases"
        yield Refusal(f"{given}; as many of both are needed, at least {LEAST}", "mux.profiled", counts)
    if AUTO in (*mux.nodes.rollout, *mux.nodes.train):
        if mux.nodes.rollout != [AUTO] or mux.nodes.train != [AUTO]:
            given = f"mux.nodes.rollout is {mux.nodes.rollout} and mux.nodes.train is {mux.nodes.train}"
            line = f"{given}; the coordinator chooses both (mux.nodes=auto) or none"
            yield Refusal(line, "mux.nodes", [mux.nodes.rollout, mux.nodes.train])
        elif not mux.coordinator:
            line = "mux.nodes=auto leaves the nodes to a coordinator, but mux.coordinator is not set"
            yield Refusal(line, "mux.coordinator", mux.coordinator)


def _plain(config: DictConfig) -> Any:
    """The values under `mux` with interpolations resolved; names that look like numbers stay names."""
    try:
        node = OmegaConf.select(config, "mux")
        values = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise Refusal(f"mux: {str(error).splitlines()[0]}", "mux") from None
    if not isinstance(values, dict):
        return {} if values is None else values
    if values.get("nodes") == AUTO:
        values["nodes"] = {"rollout": [AUTO], "train": [AUTO]}
    if isinstance(values.get("job"), int):
        values["job"] = str(values["job"])
    if isinstance(values.get("device"), dict) and isinstance(values["device"].get("sleep_level"), int):
        values["device"]["sleep_level"] = str(values["device"]["sleep_level"])
    return values


# ---------------------------------------------------------------- numbers

_POOL = f"{_ROLLOUT}.nnodes", f"{_ROLLOUT}.n_gpus_per_node"
_GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
_PARALLEL = tuple(f"{_ROLLOUT}.{kind}_parallel_size" for kind in ("tensor_model", "data", "pipeline_model"))
_ULYSSES = "fsdp_config.ulysses_sequence_parallel_size"
STORAGE_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
# All that we read and add up or compare. These may be null, or left out.
_OPTIONAL = (
    "data.train_batch_size", "data.max_prompt_length", "data.max_response_length", f"{_ROLLOUT}.n", f"{_ROLLOUT}.max_num_seqs",
    f"{_ROLLOUT}.agent.num_workers", "trainer.total_training_steps", "trainer.v1.sampler.max_off_policy_threshold",
    "trainer.save_freq", f"{_FILTER}.max_inflight_gen_batches", "ray_kwargs.ray_init.num_cpus", STORAGE_UNITS,
    *(f"{role}.{_ULYSSES}" for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")),
)  # fmt: skip
# A job that never saves has -1 there, and a Ray node may offer no CPU.
_LEAST = {"trainer.save_freq": -(2**31), "ray_kwargs.ray_init.num_cpus": 0}
_MOST = 2**31 - 1


def number(config: DictConfig, key: str, default: int = 0) -> int:
    """The whole number there; `default` where there is none, of which `refused_numbers` says what is wrong."""
    value = OmegaConf.select(config, key)
    return value if _is_whole(value, _LEAST.get(key, 1)) else default


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def refused_numbers(config: DictConfig) -> Iterator[Refusal]:
    """Each of these that is no whole number of 1 or more, as a shell or a YAML file hands it over: "8", 8.0, null, true, 0. In
    verl's own modes 0 has meanings of its own."""
    mode = str(OmegaConf.select(config, _MODE))
    pools = (*_GPUS, *_PARALLEL, *(_POOL if mode == "mux_separate" else ()), *(key for keys in own_pools(config) for key in keys))
    needed = pools if mode in MODES else ()
    for key in (*needed, *_OPTIONAL):
        value, least = OmegaConf.select(config, key), _LEAST.get(key, 1 if mode in MODES else 0)
        if not _is_whole(value, least) and (value is not None or key in needed):
            why = f": {_MODE}={mode} needs a rollout pool" if key in _POOL else ""
            allowed = "whole number" if least < 0 else f"number of {least} or more"
            yield Refusal(f"{key} is {value!r}; a {allowed} is needed{why}", key, value)


def own_pools(config: DictConfig) -> list[tuple[str, str]]:
    """Keys of the nodes and of the GPUs on each, of the roles of a job that stand on GPUs of their own, which no lease covers: a
    reward model and teachers."""
    return [(f"{role}.nnodes", f"{role}.n_gpus_per_node") for role in _own_roles(config)]


def own_engines(config: DictConfig) -> list[DictConfig]:
    """verl's rollout sections of these roles' engines."""
    parts = {
        _REWARD: lambda it: [it.rollout],
        _TEACHERS: lambda it: [teacher.inference for teacher in it.teacher_models.values()],
    }
    return [engine for role in _own_roles(config) for engine in parts[role](OmegaConf.select(config, role))]


def _own_roles(config: DictConfig) -> list[str]:
    reward = all(OmegaConf.select(config, f"{_REWARD}.{key}") for key in ("enable", "enable_resource_pool"))
    return [*([_REWARD] if reward else []), *([_TEACHERS] if OmegaConf.select(config, f"{_TEACHERS}.enabled") else [])]


def _refused_sizes(config: DictConfig, mode: str) -> Iterator[Refusal]:
    """A pool that its replicas do not fill."""
    gpus, size = _rollout_gpus(config, mode)
    if gpus and size and gpus % size:
        why = f"{gpus} rollout GPUs cannot hold replicas of {size} GPUs (tensor x data x pipeline parallel size)"
        key = _PARALLEL[0]
        yield Refusal(f"{_ROLLOUT}: {why}; the number of GPUs must be a multiple of it", key, OmegaConf.select(config, key))


def _rollout_gpus(config: DictConfig, mode: str) -> tuple[int, int]:
    """GPUs that generate, and GPUs of one replica; 0 where that is not known."""
    gpus, size = _POOL if mode == "mux_separate" else _GPUS, _PARALLEL
    return math.prod(number(config, key) for key in gpus), math.prod(number(config, key) for key in size)


# ---------------------------------------------------------------- device memory

MEGATRON, VEOMNI = "megatron", "veomni"
_STRATEGIES = ("fsdp", "fsdp2", MEGATRON, VEOMNI)
_UNSEEN = "no job has shown that its states leave the device"
# Of a training engine: keys with which they may not, and the packages that it needs.
_UNSEEN_KEYS = {MEGATRON: ("dynamic_context_parallel", "use_megatron_fsdp"), VEOMNI: ("enable_fsdp_offload",)}
_WINDOWS = ("sliding_attention", "chunked_attention")
_MODEL = "actor_rollout_ref.model"
# The rank of LoRA adapters, by whether Megatron trains.
_LORA_RANKS = {False: "lora_rank", True: "lora.rank"}
# Keys of a model's config that say its file holds quantized weights.
_QUANTIZED = ("quantization_config", "compression_config")


def _refused_memory(config: DictConfig, mode: str, unsupported: str) -> Iterator[Refusal]:
    """Each of these is right in verl's own trainer modes, where no other job wants the device."""
    for role in _trained_roles(config):
        strategy = OmegaConf.select(config, f"{role}.strategy")
        if strategy not in (None, *_STRATEGIES):
            yield from _forbid(config, [f"{role}.strategy"], f"{unsupported}: {_UNSEEN}", ", ".join(_STRATEGIES))
        keys = [f"{role}.{strategy}.{key}" for key in _UNSEEN_KEYS.get(strategy, ())]
        yield from _forbid(config, keys, f"{unsupported}: {_UNSEEN}", "False")
        if strategy == MEGATRON:
            yield from _refused_megatron(config, role, unsupported)
    yield from _refused_lora(config, unsupported)
    model = "actor_rollout_ref.model"
    yield from _forbid(config, [f"{_ROLLOUT}.quantization"], f"{unsupported}: {NO_SCALES}", "null")
    for key in (f"{model}.mtp", f"{_ROLLOUT}.mtp"):
        if OmegaConf.select(config, f"{key}.enable"):
            yield from _forbid(config, [f"{key}.enable_rollout"], f"{unsupported}: {NO_DRAFTS}", "False")
    if engine := engine_of(config):
        arguments = f"{_ROLLOUT}.engine_kwargs.{engine.name}"
        given = OmegaConf.select(config, arguments) or {}
        for name, why, allowed in engine.refused_arguments(given):
            line = f"{arguments}.{name}={given[name]} {unsupported}: {why}; allowed: {allowed}"
            yield Refusal(line, f"{arguments}.{name}", given[name])


def serves_adapter(config: DictConfig) -> bool:
    """Whether the engine has base weights of its own, and a sync brings the trainer's LoRA adapter alone."""
    ranks = (OmegaConf.select(config, f"{_MODEL}.{key}") for key in _LORA_RANKS.values())
    return any(ranks) and not OmegaConf.select(config, f"{_MODEL}.lora.merge")


def _refused_lora(config: DictConfig, unsupported: str) -> Iterator[Refusal]:
    """A rank where the trainer does not look for it, and what an engine that serves an adapter cannot do."""
    megatron = OmegaConf.select(config, "actor_rollout_ref.actor.strategy") == MEGATRON
    rank, other = (f"{_MODEL}.{_LORA_RANKS[it]}" for it in (megatron, not megatron))
    path = f"{_MODEL}.lora_adapter_path"
    if not OmegaConf.select(config, rank) and (given := OmegaConf.select(config, path)):
        yield Refusal(f"{path}={given}: verl trains no adapter without a rank; set {rank} to the adapter's", path, given)
    if not serves_adapter(config):
        return
    if not OmegaConf.select(config, rank) and (given := OmegaConf.select(config, other)):
        yield Refusal(f"{other}={given}: verl's trainer of this strategy reads {rank}; set that", other, given)
    serves = "an engine that serves an adapter"
    if str(OmegaConf.select(config, key := "mux.device.sleep_level")) == "2":
        why = f"{serves} keeps its base weights, which no sync brings; allowed: auto, 1, or {_MODEL}.lora.merge=true"
        yield Refusal(f"{key}=2: {why}", key, 2)
    ranks = number(config, key := f"{_ROLLOUT}.data_parallel_size", 1)
    if ranks > 1 and OmegaConf.select(config, f"{_ROLLOUT}.name") == "sglang":
        yield Refusal(f"{key}={ranks} {unsupported}: SGLang then takes no new adapter; allowed: 1", key, ranks)
    vanilla = "actor_rollout_ref.actor.megatron.vanilla_mbridge"
    if megatron and (cpu_platform_wanted() or OmegaConf.select(config, vanilla)):
        line = f"{_MODEL}.lora.rank with {vanilla}, which a CPU needs: Megatron-Bridge alone exports adapters"
        yield Refusal(f"{line}; allowed: {vanilla}=False on a GPU", vanilla, OmegaConf.select(config, vanilla))


def _refused_megatron(config: DictConfig, role: str, unsupported: str) -> Iterator[Refusal]:
    """What of Megatron verl leaves on the device, or no job has shown to leave it."""
    keys = OmegaConf.select(config, f"{role}.{MEGATRON}")
    if keys is None or ".FSDP" in str(OmegaConf.select(config, f"{role}._target_")):
        line = f"{role}.strategy={MEGATRON} lacks Megatron's keys and has FSDP's; set model_engine={MEGATRON}, which brings them"
        yield Refusal(line, f"{role}.strategy", MEGATRON)
        return
    if keys.get("use_distributed_optimizer") is False:
        key, why = f"{role}.{MEGATRON}.use_distributed_optimizer", "verl moves the distributed optimizer's states alone"
        yield Refusal(f"{key}=False {unsupported}: {why}; allowed: True", key, False)
    key = f"{role}.optim.optimizer"
    if (optimizer := OmegaConf.select(config, key)) not in (None, "adam"):
        why = f"with {role}.strategy={MEGATRON} verl moves Adam's states alone"
        yield Refusal(f"{key}={optimizer} {unsupported}: {why}; allowed: adam", key, optimizer)


def _trained_roles(config: DictConfig) -> tuple[str, ...]:
    return "actor_rollout_ref.actor", "actor_rollout_ref.ref", *(("critic",) if _has_critic(config) else ())


def _has_critic(config: DictConfig) -> bool:
    return OmegaConf.select(config, "algorithm.adv_estimator") == "gae" or bool(OmegaConf.select(config, "critic.enable"))


def engine_of(config: DictConfig) -> EngineRecord | None:
    """None: only a job that is refused has such an engine."""
    return engines().get(str(OmegaConf.select(config, f"{_ROLLOUT}.name")))


def model_config(config: DictConfig) -> dict[str, Any] | None:
    """The model's own `config.json`; None: it is not to be had."""
    return known_model_config(str(OmegaConf.select(config, "actor_rollout_ref.model.path")))


# Set to anything, a start takes whatever versions of verl and the engine it finds.
ANY_VERSION = "VERL_MUX_ANY_VERSION"


def version_of(package: str) -> str | None:
    """None: it is not installed. vLLM's build for the CPU has a name of its own."""
    builds = [package, f"{package}-cpu"]
    return next((it.version for build in builds for it in importlib.metadata.distributions(name=build)), None)


def is_supported(found: str, supported: str) -> bool:
    """`supported`: a range as in pyproject.toml, or "" for any."""
    return SpecifierSet(supported).contains(found, prereleases=True)


def _other_versions(config: DictConfig) -> Iterator[tuple[str, str, str]]:
    """(package, its version here, the versions that are supported) of verl and the engine, where no job has run with it."""
    engine = engine_of(config)
    for package, supported in (SUPPORTED | dict(engine.supported if engine else {})).items():
        found = version_of(package)
        if found is not None and not is_supported(found, supported):
            yield package, found, supported


def refused_versions(config: DictConfig) -> Iterator[Refusal]:
    """Our hooks may not fit, and the job would fail minutes later, or train wrongly."""
    for package, found, supported in () if os.environ.get(ANY_VERSION) else _other_versions(config):
        line = f"{package} {found} is untried, and installed here; tried: {supported}; install that, or set {ANY_VERSION}=1"
        yield Refusal(line, package, found)


def refused_surroundings(config: DictConfig, model: Mapping[str, Any] | None) -> Iterator[Refusal]:
    """What the environment's packages, and the model's `config.json`, if it is to be had, are refused for."""
    yield from _refused_attention(config)
    yield from _refused_sequence_parallel(config)
    yield from _missing_packages(config)
    key = "actor_rollout_ref.model.path"
    kind, path, engine = (model or {}).get("model_type"), OmegaConf.select(config, key), engine_of(config)
    model = _language_model(model or {})
    if engine and kind in engine.other_names and OmegaConf.select(config, "actor_rollout_ref.actor.strategy") != MEGATRON:
        line = f"{key}={path} is a {kind} model: {engine.name} does not know its weights by verl's names; allowed: others"
        yield Refusal(line, key, path)
    if quantized := next((name for name in _QUANTIZED if model.get(name)), None):
        line = f"{key}={path} is quantized ({quantized}): {NO_SCALES}; allowed: models in bf16, fp16 or fp32"
        yield Refusal(line, key, path)
    if engine and engine.no_windows and (window := sliding_window(model)):
        line = f"{key}={path} has sliding-window attention ({window}): {engine.no_windows}; allowed: models without"
        yield Refusal(line, key, path)


# Where a config names files of this machine, besides the model. verl looks for a relative path of tools in its own folder too.
_FILES = "data.train_files", "data.val_files", "data.custom_cls.path", "reward.custom_reward_function.path"


def missing_files(config: DictConfig, folder: Path = Path()) -> Iterator[Refusal]:
    """A model's folder and files that are not here: found minutes later, in another library's words. A hub's name, a pattern and
    an address (hdfs://, pkg://) are no paths, nor what a data set class of the user's takes. folder: where the job runs."""
    own_class = OmegaConf.select(config, "data.custom_cls.path")
    for key in (f"{_MODEL}.path", *(["critic.model.path"] if _has_critic(config) else []), *_FILES):
        value = None if own_class and key.endswith("_files") else OmegaConf.select(config, key)
        for path in map(str, (value,) if isinstance(value, str) else value or ()):
            named = path.startswith(("/", "~", ".")) or key in _FILES
            if named and not re.search(r"://|[*?\[]", path) and not (folder / Path(path).expanduser()).exists():
                yield Refusal(f"{key}={path}: there is no such file or folder on this machine", key, path)


def _refused_sequence_parallel(config: DictConfig) -> Iterator[Refusal]:
    """Ulysses without flash-attn: verl passes sequences between ranks inside flash-attn's calls alone, so with another attention
    each rank would train on its own part of a sequence as if that were the whole."""
    key, attention = _ULYSSES, "model.override_config.attn_implementation"
    for role in _trained_roles(config):
        ranks = number(config, f"{role}.{key}", 1)
        other = f"critic.{attention}" if role == "critic" else f"actor_rollout_ref.{attention}"
        kind = OmegaConf.select(config, other) or FLASH_ATTENTION
        if ranks > 1 and (cpu_platform_wanted() or "flash" not in kind):
            why = "a CPU has no flash-attn" if cpu_platform_wanted() else f"it does not go with {other}={kind}"
            yield Refusal(f"{role}.{key}={ranks}: {why}; allowed: 1, or flash-attn on a GPU", f"{role}.{key}", ranks)


def _missing_packages(config: DictConfig) -> Iterator[Refusal]:
    """A training engine's packages, where this machine is like the workers': a job on its CPU, or one with GPUs."""
    key = "actor_rollout_ref.actor.strategy"
    strategy = OmegaConf.select(config, key) if accelerator_present() or cpu_platform_wanted() else None
    vanilla = cpu_platform_wanted() or OmegaConf.select(config, "actor_rollout_ref.actor.megatron.vanilla_mbridge")
    needed = {MEGATRON: ("megatron.core", "mbridge" if vanilla else "megatron.bridge"), VEOMNI: (VEOMNI,)}
    for package in needed.get(str(strategy), ()):
        if not is_installed(package):
            line = f"{key}={strategy}: the package {package} is not installed here; install it, or use fsdp2"
            yield Refusal(line, key, strategy)


def _refused_attention(config: DictConfig) -> Iterator[Refusal]:
    """flash-attn 2, which verl asks for by default, where neither it nor its substitute is to be had: transformers finds that out
    minutes after the start. Only where this machine has a GPU; another one does not say what the workers' machines have."""
    if not accelerator_present() or cpu_platform_wanted([]) or torch_cuda() is None or has_flash_attention():
        return
    models = {"actor_rollout_ref.actor": "actor_rollout_ref.model", "critic": "critic.model"}
    trained = [role for role in _trained_roles(config) if OmegaConf.select(config, f"{role}.strategy") != MEGATRON]
    roles = [models[role] for role in trained if role in models]
    given = {key: OmegaConf.select(config, key) for key in (f"{role}.override_config.attn_implementation" for role in roles)}
    # verl loads a critic with flash-attn whatever the key says.
    asked = [key for key, value in given.items() if value in (None, FLASH_ATTENTION) or key.startswith("critic.")]
    if not asked or hub_has_flash_attention():
        return
    ranks = number(config, f"actor_rollout_ref.actor.{_ULYSSES}", 1)
    for key in asked:
        value = given[key] or f"null, so {FLASH_ATTENTION}"
        why = "it is not installed here, and no hub that answers has it for transformers"
        # verl hands sequences from rank to rank inside flash-attn's calls alone.
        way_out = f"or set +{key}=sdpa" if ranks == 1 else f"sdpa does not go with ulysses_sequence_parallel_size={ranks}"
        if key.startswith("critic."):
            way_out = "without which verl loads no critic"
        yield Refusal(f"{key}={value}: {why}; install flash-attn, {way_out}", key, given[key])


def sliding_window(model: Mapping[str, Any]) -> str | None:
    """The key of a model's config that says that layers see only a window."""
    config = _language_model(model)
    if any(kind in _WINDOWS for kind in config.get("layer_types") or ()):
        return "layer_types"
    if config.get("use_sliding_window") and config.get("sliding_window"):
        return "use_sliding_window"
    return None


def _language_model(model: Mapping[str, Any]) -> dict[str, Any]:
    return {**model, **(model.get("text_config") or {})}


# ---------------------------------------------------------------- what no job has done yet

_FEW = "jobs of a few steps alone have run with more than 1"
_FEW_STEPS = "jobs of a few steps on a CPU alone have run with it"
_NONE = "no job has run with it"
# (key, what jobs have run with, why anything else is worth a look)
_TRIED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("trainer.device", ("cpu",), "no job has run on it"),
    ("trainer.nnodes", (1,), "more than one ran on hosts made of network namespaces alone"),
    ("algorithm.adv_estimator", ("grpo", "gae", "rloo", "reinforce_plus_plus"), _NONE),
    ("actor_rollout_ref.actor.strategy", ("fsdp", "fsdp2"), _FEW_STEPS),
    (f"actor_rollout_ref.actor.{_ULYSSES}", (1,), _NONE),
    (f"{_TEACHERS}.enabled", (False,), _FEW_STEPS),
    (f"{_ROLLOUT}.tensor_model_parallel_size", (1,), _FEW),
    (f"{_ROLLOUT}.data_parallel_size", (1,), _NONE),
    (f"{_ROLLOUT}.pipeline_model_parallel_size", (1,), _NONE),
    (f"{_ROLLOUT}.expert_parallel_size", (1,), _NONE),
    (f"{_ROLLOUT}.enable_rollout_routing_replay", (False,), _NONE),
    (f"{_ROLLOUT}.engine_kwargs.sglang.kv_cache_dtype", ("auto",), "no job has slept with a quantized KV cache"),
    (f"{_ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype", ("auto",), "no job has slept with a quantized KV cache"),
)
_KINDS = {
    "vision_config": "images", "n_routed_experts": "experts", "num_local_experts": "experts",
    "linear_num_key_heads": "linear attention", "hybrid_override_pattern": "state-space layers",
}  # fmt: skip


# Not ours to refuse: verl's own modes fail on it in the same way.
_REMAX = "verl 0.9.1's V1 trainers, its own and ours, generate no baseline for it, and their first step fails"


def untried(config: DictConfig, model: Mapping[str, Any] | None) -> Iterator[tuple[str, Any, str]]:
    """(key, value, why) of what is accepted though no job of ours has done it. A version is, where a variable says so."""
    for package, found, supported in _other_versions(config):
        yield package, found, f"tried: {supported}; a start takes it with {ANY_VERSION}=1"
    for key, tried, why in _TRIED:
        if (value := OmegaConf.select(config, key)) is not None and value not in tried:
            yield key, value, _REMAX if value == "remax" else why
    key = "actor_rollout_ref.model.path"
    path = OmegaConf.select(config, key)
    if model is None:
        yield key, path, "its config.json is not to be had here: a start looks for quantized weights and sliding windows in it"
    for kind in dict.fromkeys(_KINDS[name] for name in _KINDS if _language_model(model or {}).get(name)):
        yield key, path, f"no job has run a model with {kind}"


# ---------------------------------------------------------------- mux.rollout


def refused_rollout_keys(config: DictConfig, mux: MuxConfig) -> Iterator[Refusal]:
    """`mux.rollout` against the rest of the job's config."""
    mode = str(config.trainer.v1.trainer_mode)
    at_once = number(config, f"{_ROLLOUT}.max_num_seqs")
    gpus, size = _rollout_gpus(config, mode)
    around = Surroundings(
        trainer_mode=mode,
        train_batch_size=number(config, "data.train_batch_size", 1),
        samples_per_group=number(config, f"{_ROLLOUT}.n", 1),
        max_response_length=number(config, "data.max_response_length", sys.maxsize),
        engine_requests=at_once * max(1, gpus // size) if at_once and size else None,
        rollout_nodes=list(mux.nodes.rollout or []),
        bypasses_old_log_probs=bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")),
        filters_groups=_filters(config),
    )
    return refused_rollout(mux.rollout, around)
