"""Trainer ranks and workers in one process, without verl: the ends that the checkpoint engine is made of."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from verl_mux.sync.connection import new_key
from verl_mux.sync.ends import End, two_stage
from verl_mux.sync.layout import Entry
from verl_mux.sync.sending import Part, Settings, Shard

Model = dict[str, bytes]


def model_of(seed: int, tensors: int = 9, largest: int = 60_000) -> Model:
    draw = random.Random(seed)
    sizes = [0, 1, *(draw.randrange(1, largest) for _ in range(tensors - 2))]
    draw.shuffle(sizes)
    return {f"t{at}": draw.randbytes(size) for at, size in enumerate(sizes)}


def stripe_of(model: Model, rank: int, ranks: int, piece_bytes: int) -> Shard:
    """What rank `rank` has of the model, an even share of each tensor."""
    entries = [Entry(name, "uint8", (len(data),), len(data)) for name, data in model.items()]
    found = []
    for at, data in enumerate(model.values()):
        start, end = len(data) * rank // ranks, len(data) * (rank + 1) // ranks
        mine = memoryview(data)[start:end]
        found.append(Part(at, start, end - start, lambda a, b, mine=mine: mine[a:b]))
    return Shard(rank, entries, found, piece_bytes)


class Ends:
    """`machines`: of each worker, by name."""

    def __init__(self, senders: int, machines: Sequence[str], plan: Callable = two_stage, **settings) -> None:
        self.settings = Settings(**{"piece_bytes": 4096, "timeout_s": 10.0, **settings})
        self.senders = [self.end("trainers", "train") for _ in range(senders)]
        self.workers = [self.end(machine, "rollout") for machine in machines]
        self.plan = plan
        self.addresses: dict[int, tuple[str, int]] = {}  # of workers, by which others reach them instead of directly
        self.join()

    def end(self, machine: str, cluster: str) -> End:
        return End(machine, machine, "127.0.0.1", cluster, self.settings)

    def set(self, **settings) -> None:
        self.settings = msgspec.structs.replace(self.settings, **settings)
        for end in (*self.senders, *self.workers):
            end._settings = self.settings

    def join(self) -> None:
        trainers, workers = [end.meeting for end in self.senders], [end.meeting for end in self.workers]
        for at, address in self.addresses.items():
            workers[at] = msgspec.structs.replace(workers[at], address=address)
        key = new_key()
        for group, parts in zip((self.senders, self.workers), self.plan(trainers, workers), strict=True):
            for end, part in zip(group, parts, strict=True):
                end.join(part, key)

    def sync(
        self,
        version: int,
        model: Model,
        shard: Callable[[int], Shard] | None = None,
        take: Callable[[End, int], Model] | None = None,
        asked: int | None = None,
    ) -> tuple[list, list]:
        """(of each worker the model it took, of each sender its figures), or the error that it had."""
        count = len(self.senders)
        shard = shard or (lambda rank: stripe_of(model, rank, count, self.settings.piece_bytes))
        version_asked = version if asked is None else asked
        with concurrent.futures.ThreadPoolExecutor(count + len(self.workers)) as pool:
            sending = [pool.submit(lambda end, rank: end.sending(shard(rank), version).run(), end, rank)
                       for rank, end in enumerate(self.senders)]  # fmt: skip
            taking = [pool.submit(take or take_all, end, version_asked) for end in self.workers]
            return [outcome(it) for it in taking], [outcome(it) for it in sending]

    def close(self) -> None:
        for end in (*self.senders, *self.workers):
            end.close()


def outcome(future: concurrent.futures.Future):
    return future.exception() or future.result()


def take_all(end: End, version: int) -> Model:
    """As an engine does: tensor by tensor, each as soon as it is there."""
    reception = end.receiving(version)
    reception.start()
    found: Model = {}
    try:
        taken, done = 0, False
        while not done:
            ready, done = reception.progress.beyond(taken)
            layout, region = reception.progress.layout, reception.progress.region
            assert layout is not None and region is not None
            for at in range(taken, ready):
                entry = layout.entries[at]
                found[entry.name] = bytes(region.view[layout.offsets[at] : layout.offsets[at] + entry.nbytes])
            taken = ready
        end.figures = reception.finish()  # type: ignore[attr-defined]
    finally:
        reception.close()
    return found


# ---------------------------------------------------------------- a link that fails


class Fault(NamedTuple):
    """On connection `connection` (as they are made; None: on each) after `after` bytes towards the worker: "cut" ends it,
    "stall" lets nothing more through, "flip" turns a bit, "late" opens it after a while, "double" makes a second one that says
    the same."""

    kind: str
    connection: int | None
    after: int


class FaultyLink:
    """Listens at `address` and passes on to `to`. `reached`: the fault has come; `unstall`: what stands still goes on."""

    def __init__(self, to: tuple[str, int], fault: Fault | None) -> None:
        self._to, self._fault = to, fault
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._sockets: list[socket.socket] = []
        self._made = 0
        self.unstall, self.reached = threading.Event(), threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._join, args=(near, self._made), daemon=True).start()
                self._made += 1

    def _join(self, near: socket.socket, number: int) -> None:
        fault = self._fault if self._fault and self._fault.connection in (number, None) else None
        if fault and fault.kind == "late":
            threading.Event().wait(0.1)
        with contextlib.suppress(OSError):
            far = socket.create_connection(self._to)
            self._sockets += [near, far]
            double = None
            if fault and fault.kind == "double":
                double = socket.create_connection(self._to)
                self._sockets.append(double)
            threading.Thread(target=self._pass, args=(far, near, None, None), daemon=True).start()
            self._pass(near, far, fault, double)

    def _pass(self, one: socket.socket, other: socket.socket, fault: Fault | None, double: socket.socket | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(one.recv(8192)):
                if fault and passed + len(data) > fault.after and fault.kind in ("cut", "stall", "flip"):
                    self.reached.set()
                    if fault.kind == "cut":
                        break
                    if fault.kind == "stall":
                        self.unstall.wait(60.0)
                    else:
                        data[max(fault.after - passed, 0)] ^= 4
                    fault = None
                passed += len(data)
                other.sendall(data)
                if double is not None:
                    with contextlib.suppress(OSError):
                        double.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.unstall.set()
        for end in (self._listener, *self._sockets):
            end.close()
