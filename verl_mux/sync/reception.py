"""One sync on one rollout worker: hands on what trainers send, puts the pieces together, gives tensors out in order.

    from trainers --> handed on to every peer --> assembly --> ready --> tensors()
    from peers ---------------------------------> assembly

Each way in has a task of its own, and what peers hand on is not handed on again: a worker that waits for room at a peer still
takes what that peer sends, so no circle of full queues can stand still, however many trainer ranks feed one worker. Both tasks
go on while the consumer works on a tensor (the engines of a tensor-parallel group wait for each other there), and pause only
while `READY_BYTES` of whole tensors lie before it.

In the assembly, a piece is staged until its tensor is complete and all tensors before it have left. Every byte of every tensor
arrives exactly once, or the sync is an error: a tensor with a hole never leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import torch
import zmq
import zmq.asyncio

from verl_mux.sync.seal import Seal
from verl_mux.sync.wire import Bucket, End, Piece, as_bytes, decode, digest, dtype_name, dtype_of

log = logging.getLogger(__name__)

READY_BYTES = 256 << 20

Frames = list[zmq.Frame]


class SyncError(RuntimeError):
    """The weights that arrived are not the trainer's of this step."""


@dataclass
class _Staged:
    """`spans`: bytes that have arrived, by offset."""

    name: str
    tensor: torch.Tensor
    missing: int
    spans: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, piece: Piece) -> _Staged:
        tensor = torch.empty(piece.shape, dtype=dtype_of(piece.dtype))
        return cls(piece.name, tensor, tensor.nbytes)

    def fits(self, piece: Piece) -> bool:
        """Whether the piece speaks of this tensor, and of bytes that it has."""
        same = (piece.name, piece.dtype, piece.shape) == (self.name, dtype_name(self.tensor.dtype), tuple(self.tensor.shape))
        return same and 0 <= piece.offset <= piece.offset + piece.nbytes <= self.tensor.nbytes

    def gapless(self) -> bool:
        """Whether the spans follow one another from the first byte on."""
        reach = 0
        for offset, nbytes in sorted(self.spans.items()):
            if offset != reach:
                return False
            reach += nbytes
        return True


class Assembly:
    """One sync on one rollout worker: version `version` from `ranks` trainer ranks."""

    def __init__(self, version: int, ranks: int, verify: bool) -> None:
        self._version, self._ranks, self._verify = version, ranks, verify
        self._staged: dict[int, _Staged] = {}
        self._next = 0
        self._ended: dict[int, End] = {}
        self.nbytes = 0

    @property
    def complete(self) -> bool:
        """Every rank has ended and every tensor has left.

        Raises:
            SyncError: every rank has ended, but bytes are missing: a rank's end comes after all its pieces on every way.
        """
        if len(self._ended) < self._ranks:
            return False
        tensors = {end.tensors for end in self._ended.values()}
        if len(tensors) > 1:
            raise SyncError(f"trainer ranks disagree on the number of tensors: {sorted(tensors)}")
        if tensors != {self._next}:
            staged = self._staged.get(self._next)
            missing = f"{staged.missing} bytes of {staged.name}" if staged else f"tensor {self._next}"
            raise SyncError(f"every trainer rank has sent all it has, but {missing} did not arrive")
        return True

    def bucket(self, bucket: Bucket, payloads: list) -> None:
        """Place a bucket's payloads (bytes-like).

        Raises:
            SyncError: another version, or bytes that are not those that were sent, or not once.
        """
        self._check_version(bucket.version)
        for piece, payload in zip(bucket.pieces, payloads, strict=True):
            if self._verify and digest(payload) != piece.digest:
                raise SyncError(f"{piece.name}: bytes {piece.offset}..{piece.offset + piece.nbytes} arrived damaged")
            self._place(piece, payload)

    def end(self, end: End) -> None:
        """A rank says that it has sent everything."""
        self._check_version(end.version)
        self._ended[end.rank] = end

    def ready(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that can leave now, in order."""
        while (staged := self._staged.get(self._next)) is not None and staged.missing == 0:
            del self._staged[self._next]
            self._next += 1
            yield staged.name, staged.tensor

    def _place(self, piece: Piece, payload) -> None:
        if piece.index < self._next:
            if piece.nbytes:
                raise SyncError(f"{piece.name} arrived twice")
            return  # a rank that holds no row of this tensor
        staged = self._staged.get(piece.index)
        if staged is None:
            staged = self._staged[piece.index] = _Staged.of(piece)
        if not staged.fits(piece) or len(payload) != piece.nbytes:
            raise SyncError(f"{piece} is no part of {staged.name}, {staged.tensor.dtype}, {tuple(staged.tensor.shape)}")
        if piece.nbytes:
            self._fill(staged, piece, payload)

    def _fill(self, staged: _Staged, piece: Piece, payload) -> None:
        if piece.offset in staged.spans or piece.nbytes > staged.missing:
            raise SyncError(f"{piece.name}: bytes {piece.offset}..{piece.offset + piece.nbytes} arrived twice")
        as_bytes(staged.tensor)[piece.offset : piece.offset + piece.nbytes] = payload
        staged.spans[piece.offset] = piece.nbytes
        if staged.missing == piece.nbytes and not staged.gapless():
            raise SyncError(f"{piece.name}: some of its bytes arrived twice, others not at all")
        staged.missing -= piece.nbytes
        self.nbytes += piece.nbytes

    def _check_version(self, version: int) -> None:
        if version != self._version:
            raise SyncError(f"rollout waits for weights of version {self._version}, the trainer sent {version}")


class Reception:
    """Made for one sync, inside its event loop. `hand_on` sends frames to every peer; `timeout_s`: longest time without news.
    What does not carry the job's `seal` is passed over."""

    def __init__(self, assembly: Assembly, hand_on: Callable[[Frames], Awaitable[None]], timeout_s: float, seal: Seal) -> None:
        self._assembly, self._hand_on, self._timeout_s, self._seal = assembly, hand_on, timeout_s, seal
        self._ready: deque[tuple[str, torch.Tensor]] = deque()
        self._held = self._strangers = 0
        self._room, self._news = asyncio.Event(), asyncio.Event()
        self._room.set()

    async def tensors(
        self, from_trainers: zmq.asyncio.Socket, from_peers: zmq.asyncio.Socket
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield (name, tensor) in export order.

        Raises:
            SyncError: other weights than asked for, damaged or missing bytes, or no news within the timeout.
        """
        tasks = [asyncio.create_task(self._take(from_trainers, True)), asyncio.create_task(self._take(from_peers, False))]
        try:
            while self._ready or not self._assembly.complete:
                if self._ready:
                    yield self._hand_out()
                else:
                    await self._wait_for_news(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, socket: zmq.asyncio.Socket, hand_on: bool) -> None:
        try:
            while True:
                await self._room.wait()
                frames = await socket.recv_multipart(copy=False)
                if (header := self._seal.take(frames[0].bytes)) is None:
                    self._strangers += 1
                    if self._strangers == 1:
                        log.warning("a message that is not of this job came on the socket for weights, and was passed over")
                    continue
                if hand_on:
                    await self._hand_on(frames)
                self._place(header, frames[1:])
                self._news.set()
        finally:
            self._news.set()

    def _place(self, header: bytes, payloads: Frames) -> None:
        try:
            message = decode(header)
        except msgspec.DecodeError as error:
            raise SyncError(f"what arrived is no weight sync of this version of verl_mux: {error}") from None
        if isinstance(message, End):
            self._assembly.end(message)
        else:
            self._assembly.bucket(message, [frame.buffer for frame in payloads])
        for name, tensor in self._assembly.ready():
            self._ready.append((name, tensor))
            self._held += tensor.nbytes
        if self._held > READY_BYTES:
            self._room.clear()

    def _hand_out(self) -> tuple[str, torch.Tensor]:
        name, tensor = self._ready.popleft()
        self._held -= tensor.nbytes
        if self._held <= READY_BYTES:
            self._room.set()
        return name, tensor

    async def _wait_for_news(self, tasks: list[asyncio.Task]) -> None:
        for task in tasks:
            if task.done():
                task.result()
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), self._timeout_s)
        except asyncio.TimeoutError:
            raise SyncError(f"no weights arrived for {self._timeout_s:g} s") from None
