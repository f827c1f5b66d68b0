"""One sync on one rollout worker: hands on what trainers send, puts the pieces together, gives tensors out in order.

    from trainers --> handed on to every peer --> assembly --> ready --> tensors()
    from peers ---------------------------------> assembly

Each way in has a task of its own, and what peers hand on is not handed on again: a worker that waits for room at a peer still
takes what that peer sends, so no circle of full queues can stand still, however many trainer ranks feed one worker. Both tasks
go on while the consumer works on a tensor (the engines of a tensor-parallel group wait for each other there), and pause only
while `READY_BYTES` of whole tensors lie before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import torch
import zmq
import zmq.asyncio

from verl_mux.sync.assembly import Assembly, SyncError
from verl_mux.sync.wire import End, decode

READY_BYTES = 256 << 20

Frames = list[zmq.Frame]


class Reception:
    """Made for one sync, inside its event loop. `hand_on` sends frames to every peer; `timeout_s`: longest time without news."""

    def __init__(self, assembly: Assembly, hand_on: Callable[[Frames], Awaitable[None]], timeout_s: float) -> None:
        self._assembly, self._hand_on, self._timeout_s = assembly, hand_on, timeout_s
        self._ready: deque[tuple[str, torch.Tensor]] = deque()
        self._held = 0
        self._room, self._news = asyncio.Event(), asyncio.Event()
        self._room.set()

    async def tensors(
        self, from_trainers: zmq.asyncio.Socket, from_peers: zmq.asyncio.Socket
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
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
                if hand_on:
                    await self._hand_on(frames)
                self._place(frames)
                self._news.set()
        finally:
            self._news.set()

    def _place(self, frames: Frames) -> None:
        try:
            message = decode(frames[0].bytes)
        except msgspec.DecodeError as error:
            raise SyncError(f"what arrived is no weight sync of this version of verl_mux: {error}") from None
        if isinstance(message, End):
            self._assembly.end(message)
        else:
            self._assembly.bucket(message, [frame.buffer for frame in frames[1:]])
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
