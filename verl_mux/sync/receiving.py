"""Receive one sync on a rollout host: one worker fills the region, the host's other workers map the same region.

    accept --> one thread a stream: pieces into the region --> progress --> one thread a local worker (Following)

Runs in rollout workers; called by ends.py; touches sockets and the host's region. The region holds the whole model, so no sender
waits for an engine that loads. No stream is let in before all local workers have joined: by then none reads an older sync.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from verl_mux.sync.connection import Connection, Header, Hello, Kind, Seal
from verl_mux.sync.layout import Assembly, Entry, Held, Layout, Lost, Manifest, Region, Span, SyncError
from verl_mux.sync.remote_reads import PLACED, READ, RemoteReads
from verl_mux.sync.sending import LAST_CALL_S, Settings, Streams, digest, said_before

_BEATS = 4  # within the timeout
_LOOK_S = 0.02  # between two looks of a listener at whether the sync is over


class Progress:
    """How far the weights on a host have come, for the engine that loads them. Thread-safe.

    unknown --attach--> some tensors ready --> ... --> done; or failed, from any state
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.region: Region | None = None
        self._ready = 0
        self._done = False
        self._error: SyncError | None = None
        self._news = threading.Condition()

    def attach(self, entries: Sequence[Entry], region: Region) -> None:
        with self._news:
            self.layout, self.region = Layout(entries), region
            self._news.notify_all()

    def advance(self, ready: int, done: bool = False) -> None:
        """`ready`: number of tensors, from the first on; `done`: all of them are there and checked."""
        with self._news:
            self._ready, self._done = max(ready, self._ready), self._done or done
            self._news.notify_all()

    def fail(self, error: SyncError) -> None:
        with self._news:
            self._error = self._error or error
            self._news.notify_all()

    def beyond(self, taken: int) -> tuple[int, bool]:
        """Wait for more than `taken` ready tensors, or for the end: (ready, done). The receiving thread bounds the wait.

        Raises:
            SyncError: the sync failed.
        """
        with self._news:
            self._news.wait_for(lambda: self._error or self._done or (self.layout is not None and self._ready > taken))
            if self._error:
                raise self._error
            return self._ready, self._done


class Role(msgspec.Struct, frozen=True, tag=True):
    """What the worker `me` receives: from each name in `upstream`, the pieces of that trainer rank; `readers`: the other workers
    of its host."""

    me: str
    upstream: dict[str, int]
    readers: list[str] = []


class Receiving:
    """The receiving of one sync at the worker that fills the region. `listeners`: for other hosts, and for the workers of this
    one; they stay open. Life: start -> finish | close."""

    def __init__(
        self, role: Role, version: int, listeners: Sequence[socket.socket], held: Held, seal: Seal, settings: Settings,
        reads: RemoteReads | None = None,
    ) -> None:  # fmt: skip
        self._role, self._version, self._listeners = role, version, listeners
        self._held, self._seal, self._settings, self._reads = held, seal, settings, reads
        self.progress = Progress()
        self._streams = Streams(role.me, self._failed)
        self._strangers: set[socket.socket] = set()  # connected, without a hello yet
        self._gathering = threading.Lock()  # of the manifests
        self._assembly = Assembly(role.upstream.values())
        self._region: Region | None = None
        self._news = threading.Condition()
        self._expected = {(peer, stream) for peer in role.upstream for stream in range(settings.streams)}
        self._readers: set[str] = set()
        self._joined: set[tuple[str, int]] = set()
        self._ended: set[tuple[str, int]] = set()
        self._incoming: list[Connection] = []
        self._over = False
        self._began = self._first = self._last = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()
        for listener in self._listeners:
            self._streams.start(self._accept, listener)
        self._streams.start(self._watch)

    def finish(self) -> dict[str, float]:
        """Wait until everything is here: bytes received, seconds until the first byte, and from it to the last.

        Raises:
            SyncError: the sync failed.
        """
        with self._news:
            self._news.wait_for(lambda: self._over or self._streams.error)
        self._streams.join()
        return {
            "received_bytes": float(sum(connection.received for connection in self._incoming)),
            "receive_seconds": max(self._last - self._first, 0.0),
            "wait_seconds": max(self._first - self._began, 0.0),
        }

    def close(self) -> None:
        """Before `finish`: fail the sync, with a message to the other ends. After it: nothing."""
        if not self._over:
            self._streams.fail(SyncError(f"{self._role.me} stopped taking weights"))
        with contextlib.suppress(SyncError):
            self._streams.join()

    # ------------------------------------------------------------ coming in

    def _accept(self, listener: socket.socket) -> None:
        """Accept until the sync is over; after a failure a little longer, to send the reason to late ends."""
        until = math.inf
        listener.settimeout(_LOOK_S)
        while time.perf_counter() < until:
            with contextlib.suppress(TimeoutError):
                sock, _ = listener.accept()
                with self._news:
                    self._strangers.add(sock)
                self._streams.start(self._welcome, sock)
            if until == math.inf and (self._over or self._streams.error):
                until = time.perf_counter() + (LAST_CALL_S if self._streams.error else 0.0)
        with self._news:
            for sock in self._strangers:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _welcome(self, sock: socket.socket) -> None:
        accepted = Connection.accepted(sock, self._seal, self._settings.timeout_s)
        with self._news:
            self._strangers.discard(sock)
        if accepted is None:
            return  # a stranger, or an end that has given up meanwhile: no concern of this sync
        connection, hello = accepted
        if (refusal := self._refusal(hello)) is not None:
            connection.try_to_say(Kind.FAILED, refusal)
            connection.close()
            if hello.version != self._version:
                raise SyncError(refusal)
            return
        self._streams.add(connection)
        self._streams.opened(connection)
        try:
            self._receive_from(connection, hello) if hello.peer in self._role.upstream else self._show(connection)
        except Lost as error:
            raise said_before(connection, error) from None

    def _refusal(self, hello: Hello) -> str | None:
        """Why the connection is refused; None: it is let in."""
        if hello.version != self._version:
            return f"rollout waits for weights of version {self._version}, {hello.peer} has {hello.version}"
        with self._news:
            key = (hello.peer, hello.stream)
            wanted = key in self._expected if hello.peer in self._role.upstream else hello.peer in self._role.readers
            if not wanted:
                return f"{self._role.me} does not wait for stream {hello.stream} of {hello.peer}"
            if key in self._joined:
                return f"stream {hello.stream} of {hello.peer} has a connection to {self._role.me} already"
            self._joined.add(key)
            if hello.peer in self._role.readers:
                self._readers.add(hello.peer)
            self._news.notify_all()
        return None

    def _receive_from(self, connection: Connection, hello: Hello) -> None:
        with self._news:
            self._incoming.append(connection)
            self._wait(lambda: len(self._readers) == len(self._role.readers))
        rank = self._role.upstream[hello.peer]
        connection.say(Kind.GO)
        self._first = self._first or time.perf_counter()
        if hello.stream == 0:
            self._manifest(connection.wait_for(Kind.MANIFEST), rank)
        with self._news:
            self._wait(lambda: self._region is not None)
        assert self._region is not None
        connection.write(Header(Kind.ROOM), fd=self._region.fd if connection.is_local else None)
        while (header := connection.read()).kind != Kind.END:
            if header.kind == Kind.PIECE and header.source == rank:
                self._take(connection, header)
            else:
                connection.expect_nothing_else(header)
        with self._news:
            self._ended.add((hello.peer, hello.stream))
            self._wait(lambda: self._ended == self._expected)
            if not self._assembly.complete:
                raise SyncError("every trainer rank has sent all it has, but pieces did not arrive")
        self._last = time.perf_counter()
        connection.say(Kind.DONE)
        self._settle()

    def _manifest(self, body: bytes, rank: int) -> None:
        """Take a manifest. The last one makes the region: minutes for the largest models, in which `_news` is free and beats go
        out."""
        with self._gathering:
            manifest = msgspec.msgpack.decode(body, type=Manifest)
            if manifest.source != rank:
                raise SyncError(f"the manifest of trainer rank {manifest.source} came from trainer rank {rank}")
            self._assembly.manifest(manifest)
            layout = self._assembly.layout
            if layout is None:
                return
            region = self._held.of(layout.nbytes)
            if self._reads is not None:
                self._reads.hold(region)
        with self._news:
            self._region = region
            self.progress.attach(layout.entries, region)
            self._moved()

    def _take(self, connection: Connection, header: Header) -> None:
        assert self._region is not None
        with self._news:
            spans, view = self._assembly.spans(header.source, header.number), self._region.view
        views, size = [view[offset : offset + nbytes] for offset, nbytes in spans], sum(nbytes for _, nbytes in spans)
        placed = header.encoding == PLACED and connection.is_local
        if placed:  # by a process of this host, which has mapped the region: nothing was on its way
            connection.received += size
        elif header.encoding == READ:
            self._read(connection, header, views)
        elif header.nbytes == size:
            connection.into(views)
        else:
            raise SyncError(
                f"piece {header.number} of trainer rank {header.source} has {header.nbytes} bytes, which is not its size"
            )
        if not placed and (self._settings.verify or header.encoding == READ) and digest(views) != header.digest:
            raise self._damaged(connection, spans)
        with self._news:
            self._assembly.place(header.source, header.number)
            self._moved()

    def _read(self, connection: Connection, header: Header, views: Sequence[memoryview]) -> None:
        if self._reads is None:
            raise SyncError(f"{connection.whom} offers its memory, {self._role.me} reads from sockets alone")
        body = connection.body(header)
        self._reads.read(connection.whom, body, views, lambda: bool(self._streams.error) or connection.has_ended())
        connection.say(Kind.TAKEN)

    def _damaged(self, connection: Connection, spans: Sequence[Span]) -> SyncError:
        layout = self._assembly.layout
        assert layout is not None
        name = layout.entries[layout.entry_at(spans[0][0])].name
        return SyncError(f"{name}: bytes that {connection.whom} sent arrived damaged")

    def _moved(self) -> None:
        self.progress.advance(self._assembly.ready, self._assembly.complete)
        self._news.notify_all()

    def _settle(self) -> None:
        with self._news:
            self._over = self._over or (self._assembly.complete and self._ended == self._expected)
            self._news.notify_all()

    # ------------------------------------------------------------ to the workers of this host

    def _idle(self, connection: Connection, until: Callable[[], bool]) -> None:
        """Wait for `until`, sending beats."""
        while True:
            with self._news:
                if self._wait(until, self._settings.timeout_s / _BEATS):
                    return
            connection.say(Kind.BEAT)

    def _show(self, connection: Connection) -> None:
        """Hand a reader the region, then how many tensors are ready."""
        connection.say(Kind.GO)
        self._idle(connection, lambda: self._region is not None)
        assert self._region is not None and self._assembly.layout is not None
        body = msgspec.msgpack.encode(self._assembly.layout.entries)
        connection.write(Header(Kind.ATTACH, nbytes=len(body), number=self._region.nbytes), [body], self._region.fd)
        shown = 0
        while not self._assembly.complete:
            self._idle(connection, lambda shown=shown: self._assembly.ready > shown or self._assembly.complete)  # type: ignore[misc]
            shown = self._assembly.ready
            connection.write(Header(Kind.READY, number=shown))
        connection.say(Kind.DONE)

    # ------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Send beats to the connected ends; name those that do not connect in time."""
        beat = self._settings.timeout_s / _BEATS
        while True:
            with self._news:
                if self._news.wait_for(lambda: self._over or self._streams.error, beat):
                    return
                incoming = list(self._incoming)
                late = time.perf_counter() - self._began > self._settings.timeout_s
                missing = self._missing() if late else []
            if missing:
                raise Lost(f"{', '.join(missing)} did not come to {self._role.me} within {self._settings.timeout_s:g} s")
            for connection in incoming:
                connection.try_to_say(Kind.BEAT)

    def _missing(self) -> list[str]:
        peers = sorted({peer for peer, _ in self._expected - self._joined})
        return [*peers, *sorted(set(self._role.readers) - self._readers)]

    def _wait(self, until: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait, holding `_news`. Raises SyncError where the sync failed."""
        found = self._news.wait_for(lambda: self._streams.error or until(), timeout)
        if self._streams.error:
            raise self._streams.error
        return bool(found)

    def _failed(self, error: SyncError) -> None:
        self.progress.fail(error)
        with self._news:
            self._news.notify_all()


class Following:
    """One sync at a worker beside the receiving one, `whom` at the local address `at`: maps its region, follows its progress."""

    def __init__(self, me: str, at: str, whom: str, version: int, held: Held, seal: Seal, timeout_s: float) -> None:
        self._hello, self._at, self._whom, self._held = Hello(me, 0, version), at, whom, held
        self._seal, self._timeout_s = seal, timeout_s
        self.progress = Progress()
        self._connection: Connection | None = None
        self._left = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> dict[str, float]:
        self._thread.join()
        return {}

    def close(self) -> None:
        self._left = True
        if self._connection is not None:
            self._connection.shut()
        self._thread.join()

    def _opened(self, connection: Connection) -> None:
        self._connection = connection
        if self._left:
            connection.shut()

    def _run(self) -> None:
        try:
            connection = Connection.to(self._at, self._whom, self._seal, self._hello, self._timeout_s, self._opened)
            try:
                self._follow(connection)
            except Lost as error:
                raise said_before(connection, error) from None
            finally:
                connection.close()
        except SyncError as error:
            self.progress.fail(error)
        except OSError as error:
            self.progress.fail(SyncError(f"the weights of {self._whom} cannot be mapped: {error.strerror}"))

    def _follow(self, connection: Connection) -> None:
        connection.wait_for(Kind.GO)
        while (header := connection.read()).kind != Kind.DONE:
            if header.kind == Kind.ATTACH:
                region = self._held.mapped(connection.take_fd(), header.number)
                entries = msgspec.msgpack.decode(connection.body(header), type=list[Entry])
                self.progress.attach(entries, region)
            elif header.kind == Kind.READY:
                self.progress.advance(header.number)
            else:
                connection.expect_nothing_else(header)
        assert self.progress.layout is not None
        self.progress.advance(len(self.progress.layout.entries), done=True)
