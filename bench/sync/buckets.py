"""Links as those of links.py where they cannot be made: each host is an address of the loopback interface, and what one sends to
another passes through this process, which lets it on as fast as the token buckets of its way fill.

Loopback has no headers to speak of, no losses, and the way back is not shaped. This process takes a part of the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from functools import partial

from bench.sync.links import BURST_BYTES, Shape
from verl_mux.sync.streams.connection import Address

_CHUNK_BYTES = 32 << 10


class _Bucket:
    """Of a link of so many bytes a second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def reserve(self, nbytes: int) -> float:
        """When they are through; of what was not used lately a burst is left."""
        self._free_at = max(self._free_at, time.monotonic() - BURST_BYTES / self._rate) + nbytes / self._rate
        return self._free_at


class Buckets:
    """As `links.Bed`."""

    kind = "buckets"

    def __init__(self, trainers: int, hosts: int, shape: Shape) -> None:
        self._shape = shape
        self.trainers = {f"t{at}": f"127.91.0.{at + 1}" for at in range(trainers)}
        self.hosts = {f"h{at}": f"127.91.1.{at + 1}" for at in range(hosts)}
        self._names = {address: name for its in (self.trainers, self.hosts) for name, address in its.items()}
        self._buckets: dict[tuple[str, ...], _Bucket] = {}
        self._ports: dict[tuple[str, Address], Address] = {}
        self._crossed = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Buckets:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def inside(self, name: str) -> list[str]:
        return []

    def crossed(self) -> int:
        """Bytes that have gone from trainers to rollout hosts."""
        return self._crossed

    def through(self, source: str, address: Address) -> Address:
        """Where `source` reaches what listens at `address`."""
        to = self._names[address[0]]
        if to == source:
            return address
        if (source, address) not in self._ports:
            serve = asyncio.start_server(partial(self._pass, source, to, address), "127.0.0.1", 0)
            server = asyncio.run_coroutine_threadsafe(serve, self._loop).result()
            self._ports[source, address] = server.sockets[0].getsockname()
        return self._ports[source, address]

    async def _pass(self, source: str, to: str, address: Address, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(back):
            far, on = await asyncio.open_connection(address[0], int(address[1]))
            with contextlib.closing(on):
                shaped = asyncio.create_task(self._let_on(near, on, self._way(source, to), source in self.trainers))
                await _copy(far, back)
                shaped.cancel()

    def _way(self, source: str, to: str) -> list[_Bucket]:
        fast, slow, kind = self._shape
        rates: dict[tuple[str, ...], float] = {("out", source): fast, ("in", to): fast}
        if source in self.trainers:
            rates[("slow", source, to) if kind == "per_pair" else ("slow",)] = slow
        return [self._buckets.setdefault(link, _Bucket(rate)) for link, rate in rates.items()]

    async def _let_on(self, near: asyncio.StreamReader, on: asyncio.StreamWriter, way: list[_Bucket], slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await near.read(_CHUNK_BYTES):
                through = max(bucket.reserve(len(data)) for bucket in way)
                await asyncio.sleep(through - time.monotonic())
                self._crossed += len(data) if slow else 0
                on.write(data)
                await on.drain()
        on.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
