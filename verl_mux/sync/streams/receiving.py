"""One sync at the process of a host where the model comes together: from trainers and other hosts into the region, on to others.

    accept --> one thread a stream: pieces into the region --> log of arrivals --> one thread a stream to each host after this one
                                                          '--> progress --> one thread a local worker (local.py)

A piece goes on as soon as it is there and checked, straight from the region. Since the region holds the whole model nobody waits
for whoever loads from it. No stream is let in before all local workers have joined: none of them reads an older sync any more.

With delta who sends hears what lies in the region, by stamps (delta.py), and may send a piece as changes of that. The stamps are
taken away before the first byte is written and come back when the last piece has been checked, so a region with parts of two
syncs has none and gets everything whole. A piece is whole and checked before anybody reads it, however it came.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from uuid import uuid4

import msgspec

from verl_mux.sync.assembly import Assembly
from verl_mux.sync.delta import CHANGES, WHOLE, apply, stamp
from verl_mux.sync.failure import Lost, SyncError
from verl_mux.sync.layout import Manifests, Span
from verl_mux.sync.progress import Progress
from verl_mux.sync.region import Held, Region
from verl_mux.sync.shard import digest
from verl_mux.sync.streams.connection import Connection, Header, Hello, Kind
from verl_mux.sync.streams.remote_reads import READ, Offering, RemoteReads
from verl_mux.sync.streams.seal import Seal
from verl_mux.sync.streams.sending import LAST_CALL_S, Settings, Streams, Target, said_before

_BEATS = 4  # within the timeout


class Role(msgspec.Struct, frozen=True):
    """`me`: as others name it. `upstream`: who sends here -> the trainer ranks whose pieces come from there; `downstream`: who
    gets all of it from here; `readers`: the other workers of this host."""

    me: str
    upstream: dict[str, list[int]]
    downstream: list[Target] = []
    readers: list[str] = []

    @property
    def sources(self) -> list[int]:
        return sorted(rank for ranks in self.upstream.values() for rank in ranks)


class Receiving:
    """Made for one sync. `listeners`: for other hosts, and for this one's workers; they stay open. Life: start -> finish |
    close."""

    def __init__(
        self, role: Role, version: int, listeners: Sequence[socket.socket], held: Held, seal: Seal, settings: Settings,
        reads: RemoteReads | None = None,
    ) -> None:  # fmt: skip
        self._role, self._version, self._listeners = role, version, listeners
        self._held, self._seal, self._settings, self._reads = held, seal, settings, reads
        self.progress = Progress()
        self._streams = Streams(role.me, self._failed)
        self._wake, self._woken = socket.socketpair()
        self._strangers: set[socket.socket] = set()  # that have not introduced themselves
        self._gathering = threading.Lock()  # of the manifests
        self._manifests = Manifests()
        self._assembly = Assembly(role.sources)
        self._region: Region | None = None
        self._stamps = held.take_stamps()  # of what was in the region before
        self._digests: dict[int, list[int]] = {}
        self._log: list[tuple[Header, bytes]] = []  # as it came: of changes their payload, the others lie in the region
        self._news = threading.Condition()
        self._expected = {(peer, stream) for peer in role.upstream for stream in range(settings.streams)}
        self._readers: set[str] = set()
        self._joined: set[tuple[str, int]] = set()
        self._ended: set[tuple[str, int]] = set()
        self._incoming: list[Connection] = []
        self._outgoing: list[tuple[str, Connection]] = []
        self._over = False
        self._began = self._first = self._last = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()
        for listener in self._listeners:
            self._streams.start(self._accept, listener)
        self._streams.start(self._watch)
        for target in self._role.downstream:
            for stream in range(self._settings.streams):
                self._streams.start(self._hand_on, target, stream, uuid4().hex)

    def finish(self) -> dict[str, float]:
        """Wait until everything is here and everybody after this has it too. bytes received, and sent by class of link; seconds
        from the first byte to the last.

        Raises:
            SyncError: it failed, anywhere.
        """
        with self._news:
            self._news.wait_for(lambda: self._over or self._streams.error)
        self._streams.join()
        self._log.clear()  # this object is there until the next sync
        found = {"received_bytes": float(sum(connection.received for connection in self._incoming))}
        for link, connection in self._outgoing:
            found[f"{link}_bytes"] = found.get(f"{link}_bytes", 0.0) + connection.sent
        return {
            **found,
            "receive_seconds": max(self._last - self._first, 0.0),
            "wait_seconds": max(self._first - self._began, 0.0),
        }

    def close(self) -> None:
        """Nothing happens after `finish`; before it, everybody is told that this one stopped."""
        if not self._over:
            self._streams.fail(SyncError(f"{self._role.me} stopped taking weights"))
        with contextlib.suppress(SyncError):
            self._streams.join()
        self._wake.close()
        self._woken.close()

    # ------------------------------------------------------------ coming in

    def _accept(self, listener: socket.socket) -> None:
        """Until the sync is over; after a failure a little longer, for those who come to it then."""
        until: float | None = None
        with selectors.DefaultSelector() as either:
            either.register(listener, selectors.EVENT_READ)
            either.register(self._woken, selectors.EVENT_READ)
            while until is None or time.perf_counter() < until:
                ready = [key.fileobj for key, _ in either.select(until and max(until - time.perf_counter(), 0.0))]
                if listener in ready:
                    sock, _ = listener.accept()
                    with self._news:
                        self._strangers.add(sock)
                    self._streams.start(self._welcome, sock)
                elif self._woken in ready:
                    either.unregister(self._woken)
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
            return  # a stranger, or one that has given up meanwhile: no concern of this sync
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
            self._receive_from(connection, hello) if hello.peer in self._role.upstream else self._tell(connection, hello.peer)
        except Lost as error:
            raise said_before(connection, error) from None

    def _refusal(self, hello: Hello) -> str | None:
        """What is wrong about who connects; None: it is let in."""
        if hello.version != self._version:
            return f"rollout waits for weights of version {self._version}, {hello.peer} has {hello.version}"
        with self._news:
            key = (hello.peer, hello.stream)
            wanted = key in self._expected if hello.peer in self._role.upstream else hello.peer in self._role.readers
            if not wanted:
                return f"nobody at {self._role.me} waits for stream {hello.stream} of {hello.peer}"
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
        allowed = set(self._role.upstream[hello.peer])
        connection.go({source: it for source, it in self._stamps.items() if source in allowed})
        self._first = self._first or time.perf_counter()
        if hello.stream == 0:
            for _ in allowed:
                self._manifest(connection.wait_for(Kind.MANIFEST), allowed)
        with self._news:
            self._wait(lambda: self._region is not None)
        connection.say(Kind.ROOM)
        while (header := connection.read()).kind != Kind.END:
            if header.kind == Kind.PIECE and header.source in allowed:
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

    def _manifest(self, body: bytes, allowed: set[int]) -> None:
        """The last one makes the region: minutes for the largest models, in which `_news` is free and beats go out."""
        with self._gathering:
            manifest = self._manifests.read(body)
            if manifest.source not in allowed:
                raise SyncError(f"the manifest of trainer rank {manifest.source} came from somebody else")
            self._assembly.manifest(manifest)
            layout = self._assembly.layout
            if layout is None:
                return
            region = self._held.of(layout.nbytes)
            if self._reads is not None:
                self._reads.hold(region)
        with self._news:
            self._region = region
            self._digests = {source: [0] * len(pieces) for source, pieces in self._assembly.pieces.items()}
            self.progress.attach(layout.entries, region)
            self._moved()

    def _take(self, connection: Connection, header: Header) -> None:
        assert self._region is not None
        with self._news:
            spans, view = self._assembly.spans(header.source, header.number), self._region.view
        views, size = [view[offset : offset + nbytes] for offset, nbytes in spans], sum(nbytes for _, nbytes in spans)
        if header.encoding != READ and (header.nbytes > size or (header.nbytes < size and header.encoding != CHANGES)):
            raise SyncError(
                f"piece {header.number} of trainer rank {header.source} has {header.nbytes} bytes, which is not its size"
            )
        body = b""
        if header.encoding == CHANGES:
            body = self._change(connection, header, spans, view)
        elif header.encoding == READ:
            self._read(connection, header, views)
        else:
            connection.into(views)
        if (self._settings.verify or header.encoding != WHOLE) and digest(views) != header.digest:
            raise self._damaged(connection, spans)
        with self._news:
            self._assembly.place(header.source, header.number)
            self._digests[header.source][header.number] = header.digest
            if self._role.downstream:
                self._log.append((header, body))
            self._moved()

    def _read(self, connection: Connection, header: Header, views: Sequence[memoryview]) -> None:
        if self._reads is None:
            raise SyncError(f"{connection.whom} offers its memory, {self._role.me} reads from sockets alone")
        body = connection.body(header)
        self._reads.read(connection.whom, body, views, lambda: bool(self._streams.error) or connection.has_ended())
        connection.say(Kind.TAKEN)

    def _change(self, connection: Connection, header: Header, spans: Sequence[Span], view: memoryview) -> bytes:
        if header.source not in self._stamps:
            raise SyncError(f"{connection.whom} sent changes of weights that {self._role.me} does not have")
        body = connection.body(header)
        try:
            apply(body, spans, view)
        except ValueError:
            raise self._damaged(connection, spans) from None
        return body

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
            if self._over or not self._assembly.complete or self._ended != self._expected:
                return
            if self._settings.delta:
                manifests = self._assembly.manifests.items()
                self._held.stamps = {source: stamp(manifest, self._digests[source]) for source, manifest in manifests}
            self._over = True
            self._news.notify_all()
            self._stop_accepting()

    # ------------------------------------------------------------ going on

    def _hand_on(self, target: Target, stream: int, attempt: str) -> None:
        hello = Hello(self._role.me, stream, self._version, attempt)
        timeout_s, add = self._settings.timeout_s, self._streams.add
        connection = Connection.to(target.address, target.whom, self._seal, hello, timeout_s, add)
        self._outgoing.append((target.link, connection))
        self._streams.opened(connection)
        try:
            held = connection.wait_for_go()
            same = {source for source, it in held.items() if it == self._stamps.get(source)}
            self._idle(connection, lambda: self._region is not None)
            if stream == 0:
                for manifest in self._assembly.manifests.values():
                    body = msgspec.msgpack.encode(manifest)
                    connection.write(Header(Kind.MANIFEST, nbytes=len(body)), [body])
            connection.wait_for(Kind.ROOM)
            offering = Offering(self._reads, connection) if self._reads is not None and not target.is_here else None
            self._pass_on(connection, stream, same, offering)
            if offering:
                offering.end()
            connection.write(Header(Kind.END))
            connection.wait_for(Kind.DONE)
        except Lost as error:
            raise said_before(connection, error) from None

    def _pass_on(self, connection: Connection, at: int, same: set[int], offering: Offering | None) -> None:
        """`same`: trainer ranks of whose part the other end has what was here before: changes go on as they came."""
        assert self._region is not None
        view = self._region.view
        pieces: Mapping[int, list[list[Span]]] = self._assembly.pieces
        while True:
            self._idle(connection, partial(self._has_come, at))
            if len(self._log) <= at:
                return
            header, body = self._log[at]
            if header.encoding == CHANGES and header.source in same:
                connection.write(header, [body])
            else:
                payload = [view[offset : offset + nbytes] for offset, nbytes in pieces[header.source][header.number]]
                whole = header._replace(encoding=WHOLE, nbytes=sum(map(len, payload)))
                offering.piece(whole, payload) if offering else connection.write(whole, payload)
            at += self._settings.streams

    def _has_come(self, at: int) -> bool:
        return len(self._log) > at or self._assembly.complete

    def _is_ready_beyond(self, told: int) -> bool:
        return self._assembly.ready > told or self._assembly.complete

    def _idle(self, connection: Connection, until) -> None:
        """Wait, and say from time to time that this one lives."""
        while True:
            with self._news:
                if self._wait(until, self._settings.timeout_s / _BEATS):
                    return
            connection.say(Kind.BEAT)

    # ------------------------------------------------------------ to the workers of this host

    def _tell(self, connection: Connection, reader: str) -> None:
        connection.say(Kind.GO)
        self._idle(connection, lambda: self._region is not None)
        assert self._region is not None and self._assembly.layout is not None
        body = msgspec.msgpack.encode(self._assembly.layout.entries)
        connection.hand(Header(Kind.ATTACH, nbytes=len(body), number=self._region.nbytes), self._region.fd, body)
        told = 0
        while not self._assembly.complete:
            self._idle(connection, partial(self._is_ready_beyond, told))
            told = self._assembly.ready
            connection.write(Header(Kind.READY, number=told))
        connection.say(Kind.DONE)

    # ------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Whoever waits for this one hears that it lives; whoever does not come is named."""
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

    def _wait(self, until, timeout: float | None = None) -> bool:
        """Holding `_news`. Raises SyncError where the sync is over with one."""
        found = self._news.wait_for(lambda: self._streams.error or until(), timeout)
        if self._streams.error:
            raise self._streams.error
        return bool(found)

    def _failed(self, error: SyncError) -> None:
        self.progress.fail(error)
        with self._news:
            self._news.notify_all()
            self._stop_accepting()

    def _stop_accepting(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
