"""verl's checkpoint engine `mux`: two-stage weight sync over ZeroMQ, from the trainers' host copies.

`actor_rollout_ref.rollout.checkpoint_engine.backend=mux`. Every trainer rank pushes its own byte ranges to one rollout worker of
each cluster; that worker hands them on to its peers. Exactly one copy of the model crosses from trainers to each cluster.
The engine object lives as long as its worker: sockets are made once and kept over syncs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
import zmq
import zmq.asyncio
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_mux.sync.export import Range, stripes
from verl_mux.sync.reception import Assembly, Frames, Reception, SyncError
from verl_mux.sync.route import Endpoint, plan_routes
from verl_mux.sync.seal import Seal, new_key
from verl_mux.sync.wire import Bucket, End, Piece, as_bytes, digest, dtype_name, encode

# Frames queued per socket before the sender waits: bounds the memory in flight to this many buckets a stream.
_HIGH_WATER = 4
# The largest piece.
_PIECE_BYTES = 64 << 20


@CheckpointEngineRegistry.register("mux")
class MuxCheckpointEngine(CheckpointEngine):
    """One end of the sync, on a trainer rank or on a rollout worker; which, says `build_topology`.

    Args:
        bucket_size: bytes a frame carries at most (pieces of large tensors are cut to it).
        verify: digest every piece and check it on arrival.
        timeout_s: a sync that stands still for longer raises SyncError.
        cluster: name of the network within which this worker's links are fast; default: its own address's cluster "local".
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, verify: bool = True, timeout_s: float = 600.0, cluster: str = "local"
    ) -> None:
        self._bucket_size = min(bucket_size, _PIECE_BYTES)
        self._verify, self._timeout_s, self._cluster = verify, timeout_s, cluster
        # Made by `prepare`, in the process that uses them.
        self._context: zmq.asyncio.Context
        self._inbox: zmq.asyncio.Socket
        self._handoff: zmq.asyncio.Socket
        self._meeting: dict[str, Any] = {}
        self._outboxes: dict[str, zmq.asyncio.Socket] = {}
        self._entry: list[str] = []
        self._peers: list[str] = []
        self._rank, self._ranks = 0, 1
        self._seal: Seal  # there when routes are

    def prepare(self) -> dict[str, Any]:
        """Bind once and say where: `address` for trainers, `handoff` for the peers of one's cluster."""
        if not self._meeting:
            self._context = zmq.asyncio.Context()
            self._inbox, address = self._bind()
            self._handoff, handoff = self._bind()
            self._meeting = {"address": address, "handoff": handoff, "cluster": self._cluster}
        return self._meeting

    @classmethod
    def build_topology(cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict]) -> tuple[dict, dict]:
        """`metadata`: of all trainer ranks, then of all rollout workers. See route.py."""
        workers = [Endpoint(m["address"], m["handoff"], m["cluster"]) for m in metadata[trainer_world_size:]]
        routes = plan_routes(trainer_world_size, workers)
        ranks, count, key = trainer_world_size, rollout_world_size, new_key()
        senders = {"rank": list(range(ranks)), "ranks": [ranks] * ranks, "entry": routes.entry, "peers": [[]] * ranks}
        receivers = {"rank": list(range(count)), "ranks": [ranks] * count, "entry": [[]] * count, "peers": routes.peers}
        senders["key"], receivers["key"] = [key] * ranks, [key] * count
        return senders, receivers

    def init_process_group(self, rank: int, ranks: int, entry: list[str], peers: list[str], key: bytes) -> None:
        """`ranks`: trainer ranks; `entry`: where this rank sends; `peers`: whom this rollout worker hands pieces on to; `key`: of
        this job's weights."""
        self._seal = Seal(key)
        self._rank, self._ranks, self._entry, self._peers = rank, ranks, entry, peers

    def finalize(self) -> None:
        """Nothing to undo: sockets are kept for the next sync."""

    async def send_weights(self, weights: Iterable, global_steps: int | None = None) -> dict[str, float]:
        """Send this rank's part of `weights`: full (name, tensor) pairs, or Ranges where our worker exports shards.

        Returns:
            `mux/sync/sent_bytes` of this rank (to one cluster) and `mux/sync/send_seconds`.
        """
        started, version, sent, tensors = time.perf_counter(), int(global_steps or 0), 0, 0
        bucket: list[Piece] = []
        payloads: list[memoryview] = []
        filled = 0
        for tensors, item in enumerate(self._ranges(weights), start=1):
            for piece, payload in self._pieces(tensors - 1, item):
                if bucket and filled + piece.nbytes > self._bucket_size:
                    await self._push(Bucket(version, self._rank, bucket), payloads)
                    bucket, payloads, filled = [], [], 0
                bucket.append(piece)
                payloads.append(payload)
                filled += piece.nbytes
                sent += piece.nbytes
        if bucket:
            await self._push(Bucket(version, self._rank, bucket), payloads)
        await self._push(End(version, self._rank, tensors, sent), [])
        return {"mux/sync/sent_bytes": float(sent), "mux/sync/send_seconds": time.perf_counter() - started}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) in export order, while every piece from a trainer is handed on to the peers.

        Raises:
            SyncError: another version than asked for, damaged or missing bytes, or no progress within the timeout.
        """
        assembly = Assembly(int(global_steps or 0), self._ranks, self._verify)
        reception = Reception(assembly, self._hand_on, self._timeout_s, self._seal)
        async with contextlib.aclosing(reception.tensors(self._inbox, self._handoff)) as tensors:
            async for name, tensor in tensors:
                yield name, tensor

    def _ranges(self, weights: Iterable) -> Iterable[Range]:
        items = iter(weights)
        first = next(items, None)
        if first is None:
            return ()
        rest = itertools.chain([first], items)
        return rest if isinstance(first, Range) else stripes(rest, self._rank, self._ranks)

    def _pieces(self, index: int, item: Range) -> Iterable[tuple[Piece, memoryview]]:
        data = as_bytes(item.data)
        for start in range(0, max(len(data), 1), self._bucket_size):
            payload = data[start : start + self._bucket_size]
            check = digest(payload) if self._verify else 0
            yield Piece(index, item.name, dtype_name(item.dtype), item.shape, item.offset + start, len(payload), check), payload

    async def _push(self, message: Bucket | End, payloads: list) -> None:
        # Payloads may be views on tensors that the caller reuses, so they are copied here once.
        await self._send_all(self._entry, [self._seal.put(encode(message)), *payloads], copy=True)

    async def _hand_on(self, frames: Frames) -> None:
        await self._send_all(self._peers, frames, copy=False)

    async def _send_all(self, addresses: list[str], frames: list, copy: bool) -> None:
        for address in addresses:
            try:
                await asyncio.wait_for(self._outbox(address).send_multipart(frames, copy=copy), self._timeout_s)
            except asyncio.TimeoutError:
                raise SyncError(f"{address} took no weights for {self._timeout_s:g} s") from None

    def _bind(self) -> tuple[zmq.asyncio.Socket, str]:
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * _PIECE_BYTES)  # from whoever reaches it
        host = ray.util.get_node_ip_address().strip("[]")
        return socket, f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}"

    def _outbox(self, address: str) -> zmq.asyncio.Socket:
        if address not in self._outboxes:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            self._outboxes[address] = socket
        return self._outboxes[address]
