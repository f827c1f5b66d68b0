"""One end of a sync in a process of its own: `python -m bench.sync.participant`. The bench sends it one order a line.

The bytes of the model are made of their places, so that every process knows them all without a file. Started by group.py; touches
its memory and its sockets.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from verl_mux.sync.ends import End, EndPart
from verl_mux.sync.layout import Entry
from verl_mux.sync.sending import Part, Settings, Shard

TENSORS = 24


def entries_of(model_bytes: int) -> list[Entry]:
    """Tensors of very different sizes, `model_bytes` together."""
    weights = [1 + at % 5 * 3 for at in range(TENSORS)]
    ends = [model_bytes * sum(weights[: at + 1]) // sum(weights) for at in range(TENSORS)]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [Entry(f"t{at}", "uint8", (size,), size) for at, size in enumerate(sizes)]


def tensor_of(index: int, nbytes: int, version: int) -> bytes:
    return np.random.default_rng([index, version]).bytes(nbytes)


def digest_of(entries: list[Entry], version: int) -> str:
    """Of the whole model."""
    hasher = hashlib.blake2b()
    for at, entry in enumerate(entries):
        hasher.update(tensor_of(at, entry.nbytes, version))
    return hasher.hexdigest()


class Participant:
    def __init__(self, host: str, address: str, cluster: str, model_bytes: int, settings: dict[str, Any]) -> None:
        self._settings = msgspec.convert(settings, Settings)
        self._end = End(host, host, address, cluster, self._settings)
        self._entries = entries_of(model_bytes)
        self._shard: Shard | None = None
        self._peak_before = _peak()

    def meet(self) -> Any:
        return msgspec.to_builtins(self._end.meeting)

    def join(self, part: dict[str, Any], key: str) -> None:
        self._end.join(msgspec.convert(part, EndPart), bytes.fromhex(key))

    def hold(self, version: int, rank: int, start: float, end: float) -> None:
        """This trainer rank has the part [start, end) of each tensor."""
        parts = []
        for at, entry in enumerate(self._entries):
            first, last = round(entry.nbytes * start), round(entry.nbytes * end)
            mine = memoryview(tensor_of(at, entry.nbytes, version)[first:last])
            parts.append(Part(at, first, last - first, partial(_between, mine)))
        self._shard = Shard(rank, self._entries, parts, self._settings.piece_bytes)

    def send(self, version: int) -> dict[str, Any]:
        assert self._shard is not None
        before = _cpu()
        found = self._end.sending(self._shard, version).run()
        return {**found, "cpu": _cpu() - before, "ended": time.time()}

    def take(self, version: int) -> dict[str, Any]:
        before = _cpu()
        reception = self._end.receiving(version)
        reception.start()
        try:
            taken, done = 0, False
            while not done:
                taken, done = reception.progress.beyond(taken)
            ended = time.time()
            found = reception.finish()
            layout, region = reception.progress.layout, reception.progress.region
            assert layout is not None and region is not None
            cpu, hasher = _cpu() - before, hashlib.blake2b()
            for entry, offset in zip(layout.entries, layout.offsets, strict=True):
                hasher.update(region.view[offset : offset + entry.nbytes])
        finally:
            reception.close()
        return {**found, "cpu": cpu, "ended": ended, "digest": hasher.hexdigest(), "grown_bytes": _peak() - self._peak_before}


def _between(data: memoryview, start: int, end: int) -> memoryview:
    return data[start:end]


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak() -> int:
    """Resident bytes of this process, at most so far. What rusage tells counts the process that started this one."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main() -> None:
    """A JSON object a line: {"do": name, ...arguments} in, {"ok": result} or {"error": text} out."""
    participant: Participant | None = None
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        try:
            if participant is None:
                participant, result = Participant(**order), None
            else:
                result = getattr(participant, what)(**order)
            reply = {"ok": result}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
