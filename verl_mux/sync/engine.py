"""verl's checkpoint engine `mux`: the model goes from the trainers' host copies to each rollout host once.

`actor_rollout_ref.rollout.checkpoint_engine.backend=mux`. Every trainer rank sends its own byte ranges; which host gets them
from whom, plan.py says. On a host they come together in one region, from which all its workers load (see receiving.py). The
engine object lives as long as its worker: its sockets and its region are made once and kept over syncs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_mux.errors import UserError
from verl_mux.sync.ends import End, Reception
from verl_mux.sync.export import Range, shard_of, stripes
from verl_mux.sync.layout import Entry, Layout
from verl_mux.sync.machine import this_machine
from verl_mux.sync.planning.routes import Meeting, Wish, part_of, parts, plan_for, topology_of
from verl_mux.sync.planning.topology import Links
from verl_mux.sync.region import Region
from verl_mux.sync.streams.aside import aside
from verl_mux.sync.streams.seal import new_key
from verl_mux.sync.streams.sending import Settings

# The largest piece; a smaller bucket of verl's makes smaller ones.
_PIECE_BYTES = 4 << 20


@CheckpointEngineRegistry.register("mux")
class MuxCheckpointEngine(CheckpointEngine):
    """One end of the sync, on a trainer rank or on a rollout worker; which, says `build_topology`.

    Args:
        bucket_size: verl's; no piece is larger.
        is_master: only trainers are told.
        verify: digest every piece and check it on arrival.
        delta: do not send what did not change since the last sync; see last_sent.py for what that costs.
        timeout_s: who is silent for so long is lost.
        streams: connections from each sender to each place that it sends to.
        method: of plan.py, or "auto": the cheapest.
        links: see topology.Links; what the cheapest is by.
        cluster: name of the network within which this end's links are fast; default: trainers are in one, rollout in another.
        interface: by whose address others reach this end; default: the one that Ray uses.
        transport, mooncake_protocol, mooncake_device: see transfer_engines.py.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        verify: bool = True,
        timeout_s: float = 120.0,
        streams: int = 2,
        method: str = "auto",
        links: Mapping[str, Any] | None = None,
        cluster: str | None = None,
        interface: str | None = None,
        delta: bool = False,
        transport: str = "sockets",
        mooncake_protocol: str = "rdma",
        mooncake_device: str = "",
    ) -> None:
        given = {"transport": transport, "mooncake_protocol": mooncake_protocol, "mooncake_device": mooncake_device}
        plain = Settings(min(bucket_size, _PIECE_BYTES), streams, timeout_s, verify, delta)
        self._settings = msgspec.structs.replace(plain, **given)
        self._wish = Wish(method, msgspec.convert(dict(links or {}), Links))
        self._cluster = cluster or ("rollout" if is_master is None else "train")
        self._interface = interface
        self._end: End | None = None
        self._rank, self._ranks = 0, 1
        # Of the last sync here.
        self.figures: dict[str, float] = {}

    def prepare(self) -> dict[str, Any]:
        """Listen, once, and say where; also the wishes, which are everybody's."""
        if self._end is None:
            address = _address_of(self._interface) if self._interface else ray.util.get_node_ip_address().strip("[]")
            self._end = End(this_machine(), socket.gethostname(), address, self._cluster, self._settings)
        return {"meeting": msgspec.to_builtins(self._end.meeting), "wish": msgspec.to_builtins(self._wish)}

    @classmethod
    def build_topology(cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict]) -> tuple[dict, dict]:
        """`metadata`: of all trainer ranks, then of all rollout workers. See plan.py."""
        ends = [msgspec.convert(it["meeting"], Meeting) for it in metadata]
        trainers, workers = ends[:trainer_world_size], ends[trainer_world_size:]
        wish = msgspec.convert(metadata[-1]["wish"], Wish)
        topology = topology_of(trainers, workers, wish.links)
        senders, receivers = parts(plan_for(topology, wish), topology, trainers, workers)
        key = new_key()
        return _columns(senders, trainer_world_size, key), _columns(receivers, trainer_world_size, key)

    def init_process_group(self, rank: int, ranks: int, part: dict, key: bytes) -> None:
        """`ranks`: trainer ranks; `part`: this end's; `key`: of this job's weights."""
        assert self._end is not None
        self._end.join(part_of(part), key)
        self._rank, self._ranks = rank, ranks

    def finalize(self) -> None:
        """Nothing to undo: sockets and region are kept for the next sync."""

    async def send_weights(self, weights: Iterable, global_steps: int | None = None) -> dict[str, float]:
        """Send this rank's part of `weights`: full (name, tensor) pairs, or Ranges where our worker exports shards.

        Returns:
            `mux/sync/...`: sent_bytes of weights, spared_bytes that delta left out, bytes by class of link with
            headers, gather_seconds until they lay on the host in a known order, read_seconds of casting, comparing and digests
            and send_seconds of writing to sockets, summed over the streams.

        Raises:
            SyncError: not everybody has got it.
        """
        assert self._end is not None
        began = time.perf_counter()
        # All of them first: making them may be a collective of the trainers, in which none may wait for a rollout host.
        shard = shard_of(self._rank, self._ranges(weights), self._settings.piece_bytes)
        gathered = time.perf_counter() - began
        sending = self._end.sending(shard, int(global_steps or 0))
        try:
            found = await aside(sending.run)
        finally:
            sending.stop()
        figures = {"gather_seconds": gathered, **found}
        return {f"mux/sync/{name}": value for name, value in figures.items()}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) in export order. The tensors lie in the host's region: they are good until the next sync, and
        nobody may write to them.

        Raises:
            SyncError: another version than asked for, damaged or missing bytes, or somebody lost; the last tensor comes only
            after
                all of the model has arrived and was checked.
        """
        async with contextlib.aclosing(self.receive_batches(global_steps, 0)) as batches:
            async for batch in batches:
                for pair in batch.tensors():
                    yield pair

    async def receive_batches(self, global_steps: int | None, nbytes: int) -> AsyncGenerator[Batch, None]:
        """The same as runs of tensors, of `nbytes` at most or of one tensor, for who maps the region in another process. All
        workers get the same runs. Raises as `receive_weights`."""
        assert self._end is not None
        began, load = time.perf_counter(), 0.0
        reception = self._end.receiving(int(global_steps or 0))
        await aside(reception.start)
        try:
            async with contextlib.aclosing(_batches(reception, nbytes)) as batches:
                async for batch in batches:
                    handed = time.perf_counter()
                    yield batch
                    load += time.perf_counter() - handed
            found = await aside(reception.finish)
        finally:
            await asyncio.shield(aside(reception.close))
        figures = {**found, "load_seconds": load, "whole_seconds": time.perf_counter() - began}
        self.figures = {f"mux/sync/{name}": value for name, value in figures.items()}

    def _ranges(self, weights: Iterable) -> Iterable[Range]:
        items = iter(weights)
        first = next(items, None)
        if first is None:
            return ()
        rest = itertools.chain([first], items)
        return rest if isinstance(first, Range) else stripes(rest, self._rank, self._ranks)


@dataclass(frozen=True)
class Batch:
    """Tensors [first, last) of the model, which are all in the region."""

    layout: Layout
    region: Region
    first: int
    last: int

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(self.first, self.last):
            entry = self.layout.entries[index]
            yield entry.name, tensor_at(self.region.view, entry, self.layout.offsets[index])


async def _batches(reception: Reception, nbytes: int) -> AsyncGenerator[Batch, None]:
    taken, done, left = 0, False, None
    while not done:
        ready, done = await aside(reception.progress.beyond, taken)
        layout, region = reception.progress.layout, reception.progress.region
        assert layout is not None and region is not None
        left = deque(layout.batches(nbytes)) if left is None else left
        while left and left[0][1] <= ready:
            yield Batch(layout, region, *left.popleft())
        taken = ready


def tensor_at(view: memoryview, entry: Entry, offset: int) -> torch.Tensor:
    """A tensor where it lies in a region."""
    dtype = getattr(torch, entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.nbytes // dtype.itemsize
    return torch.frombuffer(view, dtype=dtype, count=count, offset=offset).reshape(entry.shape)


def _columns(of: list, ranks: int, key: bytes) -> dict[str, list]:
    """As verl hands them out: a list a keyword."""
    count = len(of)
    return {"rank": list(range(count)), "ranks": [ranks] * count, "part": msgspec.to_builtins(of), "key": [key] * count}


def _address_of(interface: str) -> str:
    """Raises UserError: this machine has no such interface, or it has no address."""
    cards = psutil.net_if_addrs()
    found = [it.address for it in cards.get(interface, []) if it.family in (socket.AF_INET, socket.AF_INET6)]
    if not found:
        given = ", ".join(sorted(name for name in cards if name != "lo"))
        raise UserError(f"mux.sync.interface is {interface!r}; {socket.gethostname()} has {given or 'none'}")
    return found[0].partition("%")[0]
