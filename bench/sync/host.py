"""What a host does in a sync of a 7B-shaped model: stage by stage, and from the trainer's fp32 shards to the engines' parameters,
beside the machine's own memcpy in the same run.

Called by sync_bench.py; starts a process for the trainer rank. This one is the rollout worker and, in the place of an engine of
two ranks, copies both ranks' parts of each tensor out of the region. The ends, the cast and the stripes are the product's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any

import msgspec
import numpy as np
import psutil
import torch

from bench.measuring import child
from verl_mux.errors import UserError
from verl_mux.memory.arena import Arena
from verl_mux.sync.connection import new_key
from verl_mux.sync.ends import End, EndPart, Meeting, two_stage
from verl_mux.sync.export import Range, shard_of, stripes, tensor_at
from verl_mux.sync.layout import Entry, Layout
from verl_mux.sync.sending import Settings, Shard, digest

_ROUNDS, _RANKS = 5, 2
_HIDDEN, _LAYERS, _VOCABULARY = 3584, 28, 152064  # of Qwen2.5-7B; keys and values have a 7th of its width, its MLP 37 7ths
# What ranks of an engine divide by columns of the matrix, not by rows.
_BY_COLUMNS = ("o_proj", "down_proj")
# Streams to a host, and the largest piece, as in a job.
_SETTINGS = Settings(timeout_s=60.0)
# Memory that a memcpy goes over: more than any cache.
_COPIED = 256 << 20
# The model's bytes that lie there: fp32 shards (twice), stripes, region, parameters.
_COPIES = 5
Shapes = dict[str, tuple[int, ...]]


def shapes(nbytes: int) -> Shapes:
    """Of as many layers as there is room for in bf16, or of one that is narrow enough; the embeddings too, if they fit."""
    width = _HIDDEN
    while 2 * _numbers(_layer(width, 0)) > nbytes and width > 28:
        width //= 2
    found: Shapes = {}
    for at in range(_LAYERS):
        if found and 2 * _numbers(found | _layer(width, at)) > nbytes:
            break
        found |= _layer(width, at)
    ends = {f"{name}.weight": (_VOCABULARY, width) for name in ("embed_tokens", "lm_head")}
    return ends | found if 2 * _numbers(ends | found) <= nbytes else found


def _layer(width: int, at: int) -> Shapes:
    kv, wide = width // 7, width * 37 // 7
    sizes = {
        "q_proj": (width, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, width),
        "gate_proj": (wide, width), "up_proj": (wide, width), "down_proj": (width, wide), "norm": (width,),
    }  # fmt: skip
    return {f"layers.{at}.{name}.weight": shape for name, shape in sizes.items()}


def _numbers(of: Shapes) -> int:
    return sum(int(np.prod(shape)) for shape in of.values())


def of_a_host(nbytes: int) -> dict[str, Any]:
    """GB/s of each stage, the median of some rounds, and as a share of one thread's memcpy.

    Raises:
        UserError: there is not enough memory.
    """
    needed = _COPIES * nbytes + 2 * _COPIED + (1 << 30)
    if (free := psutil.virtual_memory().available) < needed:
        raise UserError(f"{nbytes} bytes of weights need {needed} bytes of memory here, and {free} are free")
    torch.set_num_threads(1)  # as in a process that Ray starts
    model = shapes(nbytes)
    size, rates = 2 * _numbers(model), dict[str, list[float]]()
    with child(_trainer, model) as trainer:
        there, here = (msgspec.convert(met, Meeting) for met in trainer.recv())
        worker = _Worker(model)
        stages: dict[str, Callable[[], float]] = {
            "memcpy": lambda: _memcpy(1),
            "memcpy_all_cores": lambda: _memcpy(os.cpu_count() or 1),
            **{name: lambda name=name: _ask(trainer, name) for name in ("gather", "cast")},  # type: ignore[misc]
            "receive": lambda: worker.sync(trainer, there, "as_it_is", load=False),
            "to_region": lambda: worker.sync(trainer, here, "cast_on_the_way", load=False),
            "end_to_end_sockets": lambda: worker.sync(trainer, there, "cast_on_the_way", load=True),
            "end_to_end": lambda: worker.sync(trainer, here, "cast_on_the_way", load=True),
            "load": lambda: worker.load(worker.names),
            "load_columns": lambda: worker.load(worker.by_columns),
        }
        bytes_of = dict.fromkeys(stages, size) | {"memcpy": _COPIED, "memcpy_all_cores": _COPIED}
        bytes_of["load_columns"] = sum(worker.layout.entries[at].nbytes for at in worker.by_columns)
        same = True
        for number in range(_ROUNDS + 1):
            for name, stage in stages.items():
                seconds = stage()
                if number:  # the first one makes the memory that later ones have
                    rates.setdefault(name, []).append(bytes_of[name] / seconds / 1e9)
                if name.startswith("end_to_end"):
                    same = same and worker.digest() == _ask(trainer, "digest")
        worker.close()
    found = {f"{name}_gb_per_s": median(its) for name, its in rates.items()}
    shares = {f"{name}_over_memcpy": found[f"{name}_gb_per_s"] / found["memcpy_gb_per_s"] for name in stages if name != "memcpy"}
    sizes = {"model_bytes": size, "tensors": len(model), "cores": os.cpu_count(), "rounds": _ROUNDS}
    return {**sizes, **found, **shares, "bit_equal": same}


def _memcpy(threads: int) -> float:
    """Seconds for _COPIED bytes."""
    one, other = _memory()
    parts = [slice(at * _COPIED // threads, (at + 1) * _COPIED // threads) for at in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(lambda part: np.copyto(other[part], one[part]), parts))
        return time.perf_counter() - began


_memories: list[np.ndarray] = []


def _memory() -> list[np.ndarray]:
    if not _memories:
        _memories.extend(np.full(_COPIED, at, np.uint8) for at in (1, 2))
    return _memories


def _ask(trainer: Pipe, *words: Any) -> Any:
    trainer.send(words)
    return trainer.recv()


class _Worker:
    """The rollout worker of a host, and the engine beside it. by_columns: numbers of tensors that ranks divide so."""

    def __init__(self, model: Shapes) -> None:
        self._end = End("here", "here", "127.0.0.1", "rollout", _SETTINGS)
        self._version, self._region_view = 0, memoryview(b"")
        entries = [Entry(name, "bfloat16", shape, 2 * int(np.prod(shape))) for name, shape in model.items()]
        self.layout = Layout(entries)
        self.names = range(len(entries))
        self.by_columns = [at for at, entry in enumerate(entries) if any(name in entry.name for name in _BY_COLUMNS)]
        self._params = [
            [torch.ones(_part(torch.empty(entry.shape, device="meta"), entry.name, rank).shape, dtype=torch.bfloat16)
             for rank in range(_RANKS)]
            for entry in entries
        ]  # fmt: skip

    def sync(self, trainer: Pipe, meeting: Meeting, what: str, load: bool) -> float:
        """Seconds from the order to the last tensor."""
        self._version += 1
        (sender,), (role,) = two_stage([meeting], [self._end.meeting])
        key = new_key()
        self._end.join(role, key)
        began = time.perf_counter()
        trainer.send(("send", what, msgspec.to_builtins(sender), key, self._version))
        reception = self._end.receiving(self._version)
        reception.start()
        taken, done = 0, False
        while not done:
            ready, done = reception.progress.beyond(taken)
            assert reception.progress.region is not None
            self._region_view = reception.progress.region.view
            if load:
                self.load(range(taken, ready))
            taken = ready
        reception.finish()
        seconds = time.perf_counter() - began
        reception.close()
        trainer.recv()
        return seconds

    def load(self, numbers: Sequence[int]) -> float:
        """Both ranks' parts of these tensors, as an engine's loaders take them. Returns seconds."""
        began = time.perf_counter()
        for at in numbers:
            entry = self.layout.entries[at]
            tensor = tensor_at(self._region_view, entry, self.layout.offsets[at])
            for rank, param in enumerate(self._params[at]):
                param.copy_(_part(tensor, entry.name, rank))
        return time.perf_counter() - began

    def digest(self) -> int:
        ends = zip(self.layout.offsets, self.layout.entries, strict=True)
        return digest(self._region_view[offset : offset + entry.nbytes] for offset, entry in ends)

    def close(self) -> None:
        self._end.close()


def _part(tensor: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    if tensor.dim() == 1:
        return tensor
    return tensor.chunk(_RANKS, dim=1 if any(it in name for it in _BY_COLUMNS) else 0)[rank]


def _trainer(model: Shapes, pipe: Pipe) -> None:
    """One trainer rank, which has all of the model in fp32: answers orders until its parent ends it."""
    torch.set_num_threads(1)
    some = torch.randn(1 << 20)
    states = {name: _filled(shape, some) for name, shape in model.items()}
    ranges = [Range(name, torch.bfloat16, model[name], 0, it) for name, it in states.items()]
    cast = shard_of(0, ranges, _SETTINGS.piece_bytes)
    ends = [End(host, host, "127.0.0.1", "train", _SETTINGS) for host in ("there", "here")]
    pipe.send([msgspec.to_builtins(end.meeting) for end in ends])
    gathered: list[Range] = []
    arena = Arena("exported weights")

    def full() -> Iterator[tuple[str, torch.Tensor]]:
        """As verl's generator gives them: here half of the memory of each, taken for bf16."""
        for name, it in states.items():
            yield name, it.view(-1).view(torch.bfloat16)[: it.numel()].view(it.shape)

    while True:
        what, *words = pipe.recv()
        began = time.perf_counter()
        if what == "gather":
            gathered = list(stripes(full(), 0, 1, keep=lambda name, part: arena.hold({name: part})[name]))
        elif what == "cast":
            with ThreadPoolExecutor(_SETTINGS.streams) as streams:
                for _ in streams.map(lambda number: len(cast.payload(number)), range(len(cast.pieces))):
                    pass
        elif what == "digest":
            pipe.send(digest(view for number in range(len(cast.pieces)) for view in cast.payload(number)))
            continue
        else:
            kind, part, key, version = words
            sender: Any = msgspec.convert(part, EndPart)
            end = ends[sender.targets[0].is_here]
            end.join(sender, key)
            shard: Shard = cast if kind == "cast_on_the_way" else shard_of(0, gathered, _SETTINGS.piece_bytes)
            end.sending(shard, version).run()
        pipe.send(time.perf_counter() - began)


def _filled(shape: tuple[int, ...], some: torch.Tensor) -> torch.Tensor:
    made = torch.empty(shape)
    for part in made.view(-1).split(some.numel()):
        part.copy_(some[: part.numel()])
    return made
