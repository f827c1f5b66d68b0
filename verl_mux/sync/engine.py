"""verl's checkpoint engine `mux` and its manager: the model goes from the trainers' host copies to each rollout host once.

`MuxCheckpointManager` runs in the trainer's driver and is called by trainer/modes.py; `MuxCheckpointEngine` runs in trainer
workers and rollout workers and is called by verl, and by rollout/engine/replica.py. It lives as long as its worker, so sockets
and region are made once and kept over syncs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import psutil
import ray
import torch
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

from verl_mux.errors import UserError
from verl_mux.sync.connection import new_key
from verl_mux.sync.ends import LINKS, End, EndPart, Meeting, Reception, this_machine, two_stage
from verl_mux.sync.export import Range, shard_of, stripes, tensor_at
from verl_mux.sync.layout import Layout, Lost, Region, SyncError
from verl_mux.sync.sending import Settings

T = TypeVar("T")
# The largest piece; a smaller bucket of verl's makes smaller ones.
_PIECE_BYTES = 4 << 20


@CheckpointEngineRegistry.register("mux")
class MuxCheckpointEngine(CheckpointEngine):
    """One end of the sync, on a trainer rank or on a rollout worker, as `build_topology` decides.

    Args:
        bucket_size: verl's; no piece is larger.
        is_master: verl gives it to trainer ranks only.
        verify: digest every piece and check it on arrival.
        timeout_s: an end that is silent for this long is lost.
        interface: the one by whose address other hosts reach this end; default: the one that Ray uses.
        transport: "sockets", or "nixl"; see remote_reads.py.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        verify: bool = True,
        timeout_s: float = 120.0,
        interface: str | None = None,
        transport: Literal["sockets", "nixl"] = "sockets",
    ) -> None:
        self._settings = Settings(min(bucket_size, _PIECE_BYTES), timeout_s=timeout_s, verify=verify, transport=transport)
        self._cluster = "rollout" if is_master is None else "train"
        self._interface = interface
        self._end: End | None = None
        self._rank, self._ranks = 0, 1
        # Of the last sync here.
        self.figures: dict[str, float] = {}

    def prepare(self) -> dict[str, Any]:
        """Listen, once, and return where."""
        if self._end is None:
            address = _address_of(self._interface) if self._interface else ray.util.get_node_ip_address().strip("[]")
            self._end = End(this_machine(), socket.gethostname(), address, self._cluster, self._settings)
        return {"meeting": msgspec.to_builtins(self._end.meeting)}

    @classmethod
    def build_topology(cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict]) -> tuple[dict, dict]:
        """`metadata`: what `prepare` returned on all trainer ranks, then on all rollout workers."""
        ends = [msgspec.convert(prepared["meeting"], Meeting) for prepared in metadata]
        senders, receivers = two_stage(ends[:trainer_world_size], ends[trainer_world_size:])
        key = new_key()
        return _columns(senders, trainer_world_size, key), _columns(receivers, trainer_world_size, key)

    def init_process_group(self, rank: int, ranks: int, part: dict, key: bytes) -> None:
        """`ranks`: number of trainer ranks; `part`: this end's, as plain data; `key`: the job's, which signs its frames."""
        assert self._end is not None
        self._end.join(msgspec.convert(part, EndPart), key)
        self._rank, self._ranks = rank, ranks

    def finalize(self) -> None:
        """Nothing to undo: sockets and region are kept for the next sync."""

    async def send_weights(self, weights: Iterable, global_steps: int | None = None) -> dict[str, float]:
        """Send this rank's part of `weights`: full (name, tensor) pairs, or Ranges where our worker exports shards.

        Returns:
            `mux/sync/...`: sent_bytes of weights, bytes by class of link with headers, gather_seconds until the weights lay on
            the host, read_seconds of casting and digests and send_seconds of writing to sockets, summed over the streams.

        Raises:
            SyncError: a rollout host did not get the weights.
        """
        assert self._end is not None
        began = time.perf_counter()
        # Before sending: making them may be a collective of the trainers, in which no rank may wait for a rollout host.
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
        """Yield (name, full tensor) in export order. The tensors lie in the host's region: they are valid until the next sync,
        and read-only. The last one comes only after all of the model has arrived and was checked.

        Raises:
            SyncError: another version than asked for, damaged or missing bytes, or a lost end.
        """
        async with contextlib.aclosing(self.receive_batches(global_steps, 0)) as batches:
            async for batch in batches:
                for pair in batch.tensors():
                    yield pair

    async def receive_batches(self, global_steps: int | None, nbytes: int) -> AsyncGenerator[Batch, None]:
        """As `receive_weights`, in runs of tensors of at most `nbytes` or of one tensor, for engines that map the region in
        another process. All workers get the same runs."""
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
    """Tensors [first, last) of the model, all of them in the region."""

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


def _columns(of: list, ranks: int, key: bytes) -> dict[str, list]:
    """As verl hands them out: a list for each keyword of `init_process_group`."""
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


def aside(function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """Run `function(*args)` in a thread of its own: the loop's threads are few, and the ends of a sync wait for each other."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable, value: object) -> None:
        if not future.done():
            set_it(value)

    def report(set_it: Callable, value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, set_it, value)

    def run() -> None:
        try:
            report(future.set_result, function(*args))
        except BaseException as error:
            report(future.set_exception, error)

    threading.Thread(target=run, daemon=True).start()
    return future


class MuxCheckpointManager(CheckpointEngineManager):
    """Syncs weights into mapped, idle engines, which have no requests to abort and no KV cache to release."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._rollout: RayWorkerGroup | None = None
        self._lora: dict[str, Any] | None = None

    def _workers(self) -> RayWorkerGroup:
        if self._rollout is None:
            workers = [worker for replica in self.replicas for worker in replica.workers]
            cls = RayClassWithInitArgs(cls=ray.remote(CheckpointEngineWorker))
            self._rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=cls)
            self.build_process_group(self._rollout)
            self._lora = self.actor_wg.mux_lora()[0]
        return self._rollout

    @auto_await
    async def update_weights(
        self, global_steps: int | None = None, token: int | None = None, asleep: Collection[int] = ()
    ) -> dict[str, Any]:
        """Fill every replica's weights with the trainer's, under the lease `token`. The weights of replicas `asleep` (ranks)
        come to their hosts only.

        Returns figures: bytes by class of link, seconds of each part at the slowest end, ranks.

        Raises:
            SyncError: with the reason of each end that failed. By then no end takes part any more.
            Exception: another error of one of them.
        """
        rollout = self._workers()
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        taking = rollout.update_weights(global_steps=global_steps, token=token, asleep=sorted(asleep), lora=self._lora)
        outcomes = await settled([*sending, *taking])
        raise_failure(outcomes)
        return figures(outcomes, self.actor_wg.world_size)


async def settled(taking_part: Sequence[Awaitable]) -> list[Any]:
    """The result or the error of each. Where the sync itself fails, all end soon and are waited for. After any other error (a
    lost actor, a lease that is gone) the result is None for the ends that still take part: the next sync ends them.
    """
    tasks = [asyncio.ensure_future(it) for it in taking_part]
    left = set(tasks)
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)
        if any((error := it.exception()) and not isinstance(_cause(error), SyncError) for it in done):
            break
    return [(it.exception() or it.result()) if it.done() else None for it in tasks]


def raise_failure(outcomes: list[Any]) -> None:
    """Raise the first error that is no SyncError; else one SyncError with the reasons of all ends."""
    errors = [_cause(it) for it in outcomes if isinstance(it, BaseException)]
    others = [error for error in errors if not isinstance(error, SyncError)]
    if others:
        raise others[0]
    if errors:
        reasons = dict.fromkeys(str(error) for error in sorted(errors, key=lambda error: isinstance(error, Lost)))
        raise SyncError("the weight sync failed: " + "; ".join(reasons))


def _cause(error: BaseException) -> BaseException:
    """The SyncError inside Ray's wrapper, or the error itself."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SyncError) else error


def figures(outcomes: list[Any], ranks: int) -> dict[str, Any]:
    """Bytes are added up over all ends, seconds are those of the slowest; `mux/sync/bytes`: weights that trainers sent."""
    reports = [it if isinstance(it, dict) else {} for it in outcomes]
    found: dict[str, Any] = {f"mux/sync/{link}_bytes": 0.0 for link in LINKS}
    for each in reports:
        for name, value in each.items():
            found[name] = found.get(name, 0.0) + value if name.endswith("_bytes") else max(found.get(name, 0.0), value)
    found["mux/sync/bytes"] = sum(it.get("mux/sync/sent_bytes", 0.0) for it in reports[:ranks])
    return {**found, "ranks": ranks}
