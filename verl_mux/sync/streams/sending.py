"""One sync at one trainer rank: its pieces go to every place that wants them, over several streams each, one thread a stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal
from uuid import uuid4

import msgspec

from verl_mux.sync.delta import WHOLE
from verl_mux.sync.failure import Lost, SyncError
from verl_mux.sync.last_sent import Changes, Encoded, LastSent
from verl_mux.sync.shard import Shard
from verl_mux.sync.streams.connection import Address, Connection, Header, Hello, Kind
from verl_mux.sync.streams.remote_reads import Offering, RemoteReads
from verl_mux.sync.streams.seal import Seal


class Target(msgspec.Struct, frozen=True):
    """Where a copy of the model comes together. `link`: the class of the way there, see topology.py."""

    address: Address
    whom: str
    link: str

    @property
    def is_here(self) -> bool:
        """By a socket of this host."""
        return isinstance(self.address, str)


class Settings(msgspec.Struct, frozen=True):
    """`streams`: connections a pair; `timeout_s`: who is silent for so long is lost; `verify`: a digest for each piece; `delta`:
    what did not change since the last sync is not sent. `transport`: what carries pieces between hosts; of the others
    than sockets, and of Mooncake's protocol and devices, see transfer_engines.py."""

    piece_bytes: int = 4 << 20
    streams: int = 2
    timeout_s: float = 120.0
    verify: bool = True
    delta: bool = False
    transport: Literal["sockets", "nixl", "mooncake"] = "sockets"
    mooncake_protocol: str = "rdma"
    mooncake_device: str = ""


# In which those who are just being connected to hear that it failed, and why.
LAST_CALL_S = 1.0


class Streams:
    """Threads over connections that stand or fall together: the first error ends all, and is what the others are told."""

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
        """One that is being opened."""
        with self._lock:
            self.connections.append(connection)

    def opened(self, connection: Connection) -> None:
        """Raises SyncError where it is over already: then the other end has been told so."""
        if self.error:
            connection.try_to_say(Kind.FAILED, str(self.error))
            raise self.error

    def _guarded(self, run, args) -> None:
        try:
            run(*args)
        except SyncError as error:
            self.fail(error)
        except Exception as error:  # an own fault: told like any other, so that nobody waits
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
        """And shut them. Most hear it at once; a frame on its way, which may be a beat, gets time to end."""
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
        """Until all threads have ended, also those that were started meanwhile. Raises SyncError."""
        at = 0
        while at < len(self._threads):
            self._threads[at].join()
            at += 1
        self.close()
        if self.error:
            raise self.error

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


class Sending:
    """Made for one sync. `me`: this rank, as others name it; `last`: what the one before kept. `kept`: after `run`, for the next;
    None before it, where that failed and without delta."""

    def __init__(
        self, shard: Shard, targets: Sequence[Target], me: str, version: int, seal: Seal, settings: Settings,
        last: LastSent | None = None, reads: RemoteReads | None = None,
    ) -> None:  # fmt: skip
        self._shard, self._targets, self._me, self._version = shard, targets, me, version
        self._seal, self._settings, self._reads = seal, settings, reads
        self._attempt = uuid4().hex
        self._streams = Streams(me)
        self._by_link: list[tuple[str, Connection]] = []
        self._reading_s = [0.0]
        self._sent_bytes = [0]
        self._changes = Changes(shard, last) if settings.delta else None
        self.kept: LastSent | None = None

    def run(self) -> dict[str, float]:
        """Returns when everybody has everything. bytes of weights that were sent and (with delta) that need not be, and by class
        of link with headers; seconds: of all, in reading the weights (casting, comparing, digests), and in calls that send, each
        summed over the streams; GB/s of a stream.

        Raises:
            SyncError: somebody did not get it, with the reason.
        """
        try:
            return self._run()
        finally:
            # This object is there until the next sync, the weights' memory is their owner's.
            del self._shard, self._changes

    def _run(self) -> dict[str, float]:
        began = time.perf_counter()
        for target in self._targets:
            for stream in range(self._settings.streams):
                self._streams.start(self._send, target, stream)
        self._streams.join()
        seconds, sent = time.perf_counter() - began, sum(self._sent_bytes)
        found = {f"{link}_bytes": 0.0 for link, _ in self._by_link}
        for link, connection in self._by_link:
            found[f"{link}_bytes"] += connection.sent
        waited = sum(connection.waited_s for _, connection in self._by_link)
        rate = sum(connection.sent for _, connection in self._by_link) / max(len(self._by_link), 1) / seconds / 1e9
        if self._changes is not None:
            self.kept = self._changes.sent()
        return {
            **found,
            "sent_bytes": float(sent),
            "spared_bytes": float(self._shard.nbytes * len(self._targets) - sent),
            "seconds": seconds,
            "read_seconds": sum(self._reading_s),
            "send_seconds": waited,
            "stream_gb_per_s": rate,
        }

    def stop(self) -> None:
        """From another thread: `run` ends with an error."""
        self._streams.fail(SyncError(f"{self._me} stopped sending"))

    def _send(self, target: Target, stream: int) -> None:
        hello = Hello(self._me, stream, self._version, self._attempt)
        timeout_s, add = self._settings.timeout_s, self._streams.add
        connection = Connection.to(target.address, target.whom, self._seal, hello, timeout_s, add)
        self._by_link.append((target.link, connection))
        self._streams.opened(connection)
        try:
            held = connection.wait_for_go().get(self._shard.manifest.source)
            if stream == 0:
                body = msgspec.msgpack.encode(self._shard.manifest)
                connection.write(Header(Kind.MANIFEST, nbytes=len(body)), [body])
            connection.wait_for(Kind.ROOM)
            offering = self._offering(connection, target, stream)
            for number in range(stream, len(self._shard.pieces), self._settings.streams):
                self._piece(connection, number, held, offering)
            if offering:
                offering.end()
            connection.write(Header(Kind.END))
            connection.wait_for(Kind.DONE)
        except Lost as error:
            raise said_before(connection, error) from None

    def _offering(self, connection: Connection, target: Target, stream: int) -> Offering | None:
        if self._reads is None or target.is_here:
            return None
        largest = max([sum(nbytes for _, nbytes in piece) for piece in self._shard.pieces], default=1)
        return Offering(self._reads, connection, self._reads.slots((target.whom, stream), largest))

    def _piece(self, connection: Connection, number: int, held: bytes | None, offering: Offering | None) -> None:
        began = time.perf_counter()
        encoding, payload, code = self._changes.piece(number, held) if self._changes else self._whole(number)
        self._reading_s.append(time.perf_counter() - began)
        nbytes = sum(map(len, payload))
        header = Header(Kind.PIECE, encoding, self._shard.manifest.source, number, nbytes, code)
        if offering and encoding == WHOLE:
            offering.piece(header, payload)
        else:
            connection.write(header, payload)
        self._sent_bytes.append(nbytes)

    def _whole(self, number: int) -> Encoded:
        payload = self._shard.payload(number)
        return WHOLE, [*payload], self._shard.digest(number, payload) if self._settings.verify else 0


def said_before(connection: Connection, error: SyncError) -> SyncError:
    """Why the other end left, where it said so before; else what is seen here."""
    try:
        while connection.is_waiting():
            connection.expect_nothing_else(connection.read())
    except Lost:
        pass
    except SyncError as told:
        return told
    return error
