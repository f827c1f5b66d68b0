"""Send one trainer rank's part of the model to every rollout host, over several streams each, one thread a stream.

Runs in trainer workers; called by ends.py; touches sockets. `Streams` also serves receiving.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

import msgspec
import xxhash

from verl_mux.sync.connection import Address, Connection, Header, Hello, Kind, Seal
from verl_mux.sync.layout import Entry, Held, Layout, Lost, Manifest, Span, SyncError, cut
from verl_mux.sync.remote_reads import PLACED, WHOLE, Offering, RemoteReads

# Cast pieces kept for the other hosts while one host after the other is sent them.
_KEPT = 2
# After a failure: seconds in which ends that are just connecting still hear that it failed, and why.
LAST_CALL_S = 1.0


@dataclass(frozen=True)
class Part:
    """Bytes [offset, offset + nbytes) of tensor `index`. `read(start, end)` returns bytes counted from the part's first;
    `into(start, view)` fills the view with those from `start` on, or returns False: only `read` can."""

    index: int
    offset: int
    nbytes: int
    read: Callable[[int, int], memoryview]
    into: Callable[[int, memoryview], bool] = lambda start, view: False


class Shard:
    """What one trainer rank sends: its manifest, and the bytes of its pieces where they lie. `made`: reading a part makes a copy
    (it is cast), so a piece is read once for all hosts. Thread-safe."""

    def __init__(
        self, source: int, entries: Sequence[Entry], parts: Iterable[Part], piece_bytes: int, made: bool = False
    ) -> None:
        layout = Layout(entries)
        self._parts = sorted((part for part in parts if part.nbytes), key=lambda part: (part.index, part.offset))
        spans = [(layout.offsets[part.index] + part.offset, part.nbytes) for part in self._parts]
        self.manifest = Manifest.of(source, entries, spans, piece_bytes)
        self.pieces = cut(spans, piece_bytes)
        self.region_bytes = layout.nbytes
        self._where = self._places(spans)
        self._made = made
        self._kept: OrderedDict[int, Future[list[memoryview]]] = OrderedDict()
        self._digests: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.manifest.spans)

    def _places(self, spans: Sequence[Span]) -> list[list[tuple[int, int]]]:
        """For each piece and each of its spans: the part's number, and the first byte in that part."""
        at, places = 0, []
        for piece in self.pieces:
            found = []
            for offset, nbytes in piece:
                found.append((at, offset - spans[at][0]))
                if offset + nbytes == sum(spans[at]):
                    at += 1
            places.append(found)
        return places

    def payload(self, number: int) -> list[memoryview]:
        """A piece's bytes, span by span. Of those that are made, each thread makes another one."""
        if not self._made:
            return self._read(number)
        with self._lock:
            made = self._kept.get(number)
            if is_mine := made is None:
                made = self._kept[number] = Future()
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        if is_mine:
            try:
                made.set_result(self._read(number))
            except BaseException as error:  # the other threads that wait for this piece get it too
                made.set_exception(error)
        return made.result()

    def place(self, number: int, region: memoryview) -> None:
        """Put a piece's bytes where they go in a host's region."""
        for (part, start), (offset, nbytes) in zip(self._where[number], self.pieces[number], strict=True):
            view = region[offset : offset + nbytes]
            if not self._parts[part].into(start, view):
                view[:] = self._parts[part].read(start, start + nbytes)

    def _read(self, number: int) -> list[memoryview]:
        spans = zip(self._where[number], self.pieces[number], strict=True)
        return [self._parts[part].read(start, start + nbytes) for (part, start), (_, nbytes) in spans]

    def digest(self, number: int, payload: Sequence[memoryview]) -> int:
        """Digest of a piece, computed once for all hosts."""
        if number not in self._digests:
            self._digests[number] = digest(payload)
        return self._digests[number]


def digest(views: Iterable[memoryview]) -> int:
    """xxh3-64 of the views' bytes, one view after the other; never 0, which stands for no digest."""
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view)
    return hasher.intdigest() or 1


class Target(msgspec.Struct, frozen=True):
    """A worker that receives a copy of the model. `link`: class of the way there, one of LINKS."""

    address: Address
    whom: str
    link: str

    @property
    def is_here(self) -> bool:
        """Reached over a local socket."""
        return isinstance(self.address, str)


class Settings(msgspec.Struct, frozen=True):
    """`streams`: connections of a pair; `timeout_s`: an end that is silent for this long is lost; `verify`: a digest for each
    piece; `transport`: what carries pieces between hosts."""

    piece_bytes: int = 4 << 20
    streams: int = 2
    timeout_s: float = 120.0
    verify: bool = True
    transport: Literal["sockets", "nixl"] = "sockets"


class Streams:
    """Threads over connections that fail together: the first error ends all, and is sent to the other ends."""

    def __init__(self, me: str, on_error: Callable[[SyncError], None] = lambda _: None) -> None:
        self._me, self._on_error = me, on_error
        self.error: SyncError | None = None
        self.connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, run, *args: object) -> None:
        thread = threading.Thread(target=self._guarded, args=(run, args), daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def add(self, connection: Connection) -> None:
        """Register a connection that is being opened."""
        with self._lock:
            self.connections.append(connection)

    def opened(self, connection: Connection) -> None:
        """Raises SyncError where the sync failed meanwhile, after sending the reason to the other end."""
        if self.error:
            connection.try_to_say(Kind.FAILED, str(self.error))
            raise self.error

    def _guarded(self, run, args) -> None:
        try:
            run(*args)
        except SyncError as error:
            self.fail(error)
        except Exception as error:  # a fault of this code is sent like any other, so that no end waits
            self.fail(SyncError(f"{self._me}: {type(error).__name__}: {error}"))

    def fail(self, error: SyncError) -> None:
        with self._lock:
            if self.error:
                return
            self.error = error
            connections = list(self.connections)
        self._tell([it for it in connections if it.introduced], str(error))
        self._on_error(error)
        last_call = threading.Timer(LAST_CALL_S, self._shut)
        last_call.daemon = True
        last_call.start()

    def _tell(self, connections: list[Connection], text: str) -> None:
        """Send the reason and shut them. Most get it at once; a frame in progress, maybe a beat, gets time to end."""
        busy = []
        for connection in connections:
            connection.write_no_more()
        for connection in connections:
            if connection.try_to_say(Kind.FAILED, text):
                connection.shut()
            else:
                busy.append(connection)
        until = time.perf_counter() + LAST_CALL_S
        for connection in busy:
            connection.try_to_say(Kind.FAILED, text, max(until - time.perf_counter(), 0.0))
            connection.shut()

    def _shut(self) -> None:
        for connection in list(self.connections):
            connection.shut()

    def join(self) -> None:
        """Wait until all threads have ended, also those started meanwhile. Raises SyncError."""
        at = 0
        while at < len(self._threads):
            self._threads[at].join()
            at += 1
        for connection in self.connections:
            connection.close()
        if self.error:
            raise self.error


class Sending:
    """The sending of one sync at one trainer rank. `me`: this rank's name in messages. `held`: the region of this rank's own
    host, into which its pieces go without a socket."""

    def __init__(
        self, shard: Shard, targets: Sequence[Target], me: str, version: int, held: Held, seal: Seal, settings: Settings,
        reads: RemoteReads | None = None,
    ) -> None:  # fmt: skip
        self._shard, self._targets, self._me, self._version, self._held = shard, targets, me, version, held
        self._mapping = threading.Lock()
        self._seal, self._settings, self._reads = seal, settings, reads
        self._attempt = uuid4().hex
        self._streams = Streams(me)
        self._by_link: list[tuple[str, Connection]] = []
        self._reading_s = [0.0]
        self._sent_bytes = [0]

    def run(self) -> dict[str, float]:
        """Return when every target has everything: bytes of weights sent, bytes by class of link with headers; seconds: of all,
        in reading the weights (casting, digests), and in calls that send, each summed over the streams; GB/s of a stream.

        Raises:
            SyncError: a target did not get it, with the reason.
        """
        began = time.perf_counter()
        try:
            for target in self._targets:
                for stream in range(self._settings.streams):
                    self._streams.start(self._send, target, stream)
            self._streams.join()
        finally:
            del self._shard  # this object stays until the next sync, the weights' memory may not
        seconds = time.perf_counter() - began
        by_link: Counter[str] = Counter()
        for link, connection in self._by_link:
            by_link[f"{link}_bytes"] += connection.sent
        return {
            **{name: float(num_bytes) for name, num_bytes in by_link.items()},
            "sent_bytes": float(sum(self._sent_bytes)),
            "seconds": seconds,
            "read_seconds": sum(self._reading_s),
            "send_seconds": sum(connection.waited_s for _, connection in self._by_link),
            "stream_gb_per_s": by_link.total() / max(len(self._by_link), 1) / seconds / 1e9,
        }

    def stop(self) -> None:
        """Let `run` end with an error; called from another thread."""
        self._streams.fail(SyncError(f"{self._me} stopped sending"))

    def join(self) -> None:
        """Wait until nothing more is written to a region."""
        with contextlib.suppress(SyncError):
            self._streams.join()

    def _send(self, target: Target, stream: int) -> None:
        hello = Hello(self._me, stream, self._version, self._attempt)
        timeout_s, add = self._settings.timeout_s, self._streams.add
        connection = Connection.to(target.address, target.whom, self._seal, hello, timeout_s, add)
        self._by_link.append((target.link, connection))
        self._streams.opened(connection)
        try:
            connection.wait_for(Kind.GO)
            if stream == 0:
                body = msgspec.msgpack.encode(self._shard.manifest)
                connection.write(Header(Kind.MANIFEST, nbytes=len(body)), [body])
            connection.wait_for(Kind.ROOM)
            region = self._region_here(connection) if target.is_here else None
            offering = self._offering(connection, target, stream)
            for number in range(stream, len(self._shard.pieces), self._settings.streams):
                if region is None:
                    self._piece(connection, number, offering)
                else:
                    self._place(connection, number, region)
            if offering:
                offering.end()
            connection.write(Header(Kind.END))
            connection.wait_for(Kind.DONE)
        except Lost as error:
            raise said_before(connection, error) from None

    def _region_here(self, connection: Connection) -> memoryview:
        fd = connection.take_fd()
        with self._mapping:
            return self._held.mapped(fd, self._shard.region_bytes).view

    def _place(self, connection: Connection, number: int, region: memoryview) -> None:
        began = time.perf_counter()
        self._shard.place(number, region)
        self._reading_s.append(time.perf_counter() - began)
        nbytes = sum(nbytes for _, nbytes in self._shard.pieces[number])
        connection.write(Header(Kind.PIECE, PLACED, self._shard.manifest.source, number))
        connection.sent += nbytes
        self._sent_bytes.append(nbytes)

    def _offering(self, connection: Connection, target: Target, stream: int) -> Offering | None:
        if self._reads is None or target.is_here:
            return None
        largest = max([sum(nbytes for _, nbytes in piece) for piece in self._shard.pieces], default=1)
        return Offering(self._reads, connection, self._reads.slots((target.whom, stream), largest))

    def _piece(self, connection: Connection, number: int, offering: Offering | None) -> None:
        began = time.perf_counter()
        payload = self._shard.payload(number)
        code = self._shard.digest(number, payload) if self._settings.verify else 0
        self._reading_s.append(time.perf_counter() - began)
        nbytes = sum(map(len, payload))
        header = Header(Kind.PIECE, WHOLE, self._shard.manifest.source, number, nbytes, code)
        if offering:
            offering.piece(header, payload)
        else:
            connection.write(header, payload)
        self._sent_bytes.append(nbytes)


def said_before(connection: Connection, error: SyncError) -> SyncError:
    """The reason that the other end sent before it left, or else `error`."""
    try:
        while connection.has_news():
            connection.expect_nothing_else(connection.read())
    except Lost:
        pass
    except SyncError as reason:
        return reason
    return error
