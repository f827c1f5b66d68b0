"""Engines at the limit: real ones on the CPU take turns on a device that has room for one awake beside the others asleep."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.gpu.engine_process import CPU_CHARGES, CPU_PREFILL, CPU_TOKENS, REQUESTS
from tests.gpu.engines import Bed, Engine, EngineEnded, opened
from tests.memory.certificate.models import verl
from verl_mux.memory.certificate.certify import Capacity, certify
from verl_mux.memory.certificate.job import Job, read_job
from verl_mux.memory.tags import KV_CACHE, WEIGHTS

SHARE = 0.95
PLENTY = 10**12


class Limits(msgspec.Struct, frozen=True):
    """What a certificate says of the rollout node. total: of one awake beside the others asleep."""

    total: int
    tags: dict[str, int]
    activations: int


class Outcome(msgspec.Struct):
    """failures: of turns, in words. ended: what engines said that could not start. peak: bytes on the device, of all looks."""

    turns: int = 0
    failures: list[str] = msgspec.field(default_factory=list)
    ended: list[str] = msgspec.field(default_factory=list)
    peak: int = 0
    tags: dict[str, int] = msgspec.field(default_factory=dict)


def _job(name: str, model: dict[str, Any]) -> Job:
    sglang = {"max_total_tokens": CPU_TOKENS, "chunked_prefill_size": CPU_PREFILL}
    rollout = {
        "dtype": "float32", "n_gpus_per_node": 1, "gpu_memory_utilization": SHARE, "max_num_seqs": REQUESTS,
        "engine_kwargs": {"sglang": sglang},
    }  # fmt: skip
    config = verl(name, rollout)
    # A device with a budget has no graphs that could sleep: their charge stays.
    config["mux"]["device"] = {"budget": 1.0}
    return msgspec.structs.replace(read_job(config, model), charges=CPU_CHARGES)


def limits(model: Path, names: Sequence[str]) -> Limits:
    """Of jobs with such engines and this model, which share r0."""
    config = json.loads((model / "config.json").read_text())
    capacities = {("r0", "rollout"): Capacity(gpu=PLENTY), ("t0", "train"): Capacity(gpu=PLENTY)}
    found = certify([_job(name, config) for name in names], capacities).gpus["r0"].phases["rollout"]
    return Limits(found.total, {tag: found.bytes[tag] for tag in (WEIGHTS, KV_CACHE)}, found.bytes["activations"])


class Turns:
    """Engines that start one after the other behind their gates, and then take turns: awake, synced, asked, asleep."""

    def __init__(self, bed: Bed, names: Sequence[str]) -> None:
        self._bed, self.told = bed, Outcome()
        self._expected: dict[str, list[int]] = {}
        self.engines = [engine for engine in self._launched(names) if self._starts(engine)]

    def _launched(self, names: Sequence[str]) -> list[Engine]:
        engines = [self._bed.engine(name, SHARE, gate=True) for name in names]
        for engine in engines:
            engine.wait_at_gate()
        return engines

    def join(self, name: str) -> None:
        """One more, while the others sleep."""
        self.engines += [engine for engine in self._launched([name]) if self._starts(engine)]

    def _starts(self, engine: Engine) -> bool:
        try:
            engine.open()
            self._expected[engine.name] = engine.tokens()
            self._look()
            engine.sleep()
        except EngineEnded as ended:
            self.told.ended.append(str(ended))
            return False
        self.told.tags = engine.tags
        return True

    def take(self, turns: int) -> None:
        for turn in range(turns):
            engine = self.engines[turn % len(self.engines)]
            try:
                engine.back()
                self._look()
                if engine.tokens() != self._expected[engine.name]:
                    self.told.failures.append(f"{engine.name} gives other tokens in turn {turn}")
                engine.sleep()
            except RuntimeError as error:
                self.told.failures.append(f"{engine.name} in turn {turn}: {error}")
            self.told.turns += 1

    def _look(self) -> None:
        """One engine moves at a time, and what it holds only grows until it is awake: the peak is a moment like this one."""
        self.told.peak = max(self.told.peak, sum(self._bed.by_pid().values()))


@contextlib.contextmanager
def turns_on(folder: Path, names: Sequence[str], budget: int, interpreter: Sequence[str]) -> Iterator[Turns]:
    for bed in opened("cpu", folder, budget, interpreter):
        yield Turns(bed, names)
