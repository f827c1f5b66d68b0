"""What an inference engine is for us: the one place where the rest of verl_mux meets it.

An engine is a folder beside this file, with a record of its own (`RECORD` of its record.py), named in plugin.py's table. Reading
a record imports no engine: classes are dotted names.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_mux.upstream import Symbol

Arguments = Mapping[str, Any]
# Why some arguments are refused.
NO_SCALES = "its scales do not survive a sleep"
NO_DRAFTS = "nothing brings a draft model back after a sleep"


@dataclass(frozen=True)
class EngineRecord:
    """What the user gave under `engine_kwargs` wins over all arguments here.

    name: the engine's in `actor_rollout_ref.rollout.name`, its arguments' in `rollout.engine_kwargs`, and its Python package's.
    supported: ranges of its packages' versions. tested: the versions in requirements/lock.txt.
    preload: modules that its processes need, for the job's fork server; none of them starts a thread or imports ray.
    prefill: key under actor_rollout_ref.rollout of the tokens of one prefill; -1 there stands for whole prompts.
    share_of_all: gpu_memory_utilization is the share of all of a GPU's memory that weights, KV cache, activations and graphs get;
        False: the share of what is free that weights and KV cache get. graphs_sleep: CUDA graphs leave the GPU with the weights.
    symbols: its own names that we rely on, and those of verl's part for it.
    seed: a request's seed among its sampling parameters.
    server: dotted name of our subclass of verl's server of this engine, see below.
    scheduler_title: what the command lines of its schedulers begin with.
    load_weights: dotted name of `async (adapter, batches of a sync, version, lora)`, which loads them into the engine; `lora`:
        peft's config where they are a LoRA adapter, in one batch, else None.
    adapter: dotted name of what a rollout worker makes, of (rollout config, replica's rank), for that; None: verl's own adapter.
    cache_tokens, cache_bytes: its argument that fixes the size of the KV cache, in one or the other; "": it has none.
    arguments: of every engine of ours; a list is added to the user's.
    lora_arguments: where it serves the trainer's LoRA adapter.
    priority_arguments: where requests have priorities, by the arguments given; none where those forbid it.
    prefill_graphs: whether, by the arguments given, it captures graphs of prefills that stay on the GPU while it sleeps.
    refused_arguments: (name, why, what is allowed) of each of the arguments given that loses weights or keeps memory asleep.
    no_windows: why a model with sliding-window attention is refused; empty: it is not.
    no_teacher: why none of verl's teachers runs on it; empty: they do.
    other_names: model types of which it does not know the weights by the names that they have in transformers 5.
    cpu_arguments: where there is no GPU. stock_cpu_arguments: there, in verl's own trainer modes, where no engine sleeps.

    The server keeps to one way of saying things, whatever its engine's is: `sleep(tags)` and `wake_up(tags)` take the tags of
    memory/tags.py, whether its engine moves each by itself or all at once, and return (node, Moves);
    `generate(engine_priority=)` puts the higher number first and answers with one of the stop reasons of serving.py;
    `abort_requests(ids)` returns when these have left with the tokens that they have; `processes()` are all of its engine's.
    """

    name: str
    supported: Mapping[str, str]
    tested: Mapping[str, str]
    preload: tuple[str, ...]
    prefill: str
    share_of_all: bool
    graphs_sleep: bool
    symbols: tuple[Symbol, ...]
    seed: str
    server: str
    scheduler_title: str
    load_weights: str
    adapter: str | None = None
    cache_tokens: str = ""
    cache_bytes: str = ""
    arguments: Arguments = field(default_factory=dict)
    lora_arguments: Arguments = field(default_factory=dict)
    priority_arguments: Callable[[Arguments], Arguments] = lambda given: {}
    prefill_graphs: Callable[[Arguments], bool] = lambda given: False
    refused_arguments: Callable[[Arguments], Iterable[tuple[str, str, str]]] = lambda given: ()
    no_windows: str = ""
    no_teacher: str = ""
    other_names: tuple[str, ...] = ()
    cpu_arguments: Arguments = field(default_factory=dict)
    stock_cpu_arguments: Arguments = field(default_factory=dict)


def engines() -> dict[str, EngineRecord]:
    """All records, by name."""
    # In a process of verl's it is loaded already; in any other, only who asks for engines pays for it.
    from verl_mux import plugin

    return {name: importlib.import_module(module).RECORD for name, module in plugin.ENGINES.items()}


def installed() -> list[EngineRecord]:
    """Of the engines whose packages are in this environment; two of them may not fit into one."""
    return [engine for engine in engines().values() if is_installed(engine.name)]


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):  # of a package above it; SGLang leaves an empty module of vLLM's name
        return False
