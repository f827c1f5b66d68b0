"""One stream between two ends of a sync: a TCP connection, or a local one, with frames of a header and payload.

    who connects:          hello -->                    manifests -->                  frames of pieces -->
    who accepts:  nonce -->          go (or failed) -->               beats, room -->                      beats, then done -->

Either may say instead that it failed. Nothing is sent between manifests and room: however long who accepts takes to make room for
the model, its beats say that it lives, and no call that sends stands still.

Blocking sockets with the kernel's own time limits: a payload goes between the socket and the memory where it lies, in one call
for as much as there is, and no copy of ours is in between. One thread reads a connection; several may write.
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from verl_mux.sync.failure import Lost, SyncError
from verl_mux.sync.streams.seal import CODE_BYTES, Seal

_MAGIC = b"VMX5"
_NONCE_BYTES = 16
_LENGTH = struct.Struct("!I")
_HEADER = struct.Struct("!BBHIQQQ")
# Of a hello, from whoever reaches the socket; of a text or a manifest, from one of ours.
_HELLO_BYTES, _BODY_BYTES = 4096, 1 << 30
# Vectors that one call takes.
_VECTORS = 512
Address = str | tuple[str, int]


class Kind(enum.IntEnum):
    GO = 1
    MANIFEST = 2
    PIECE = 3
    END = 4
    BEAT = 5
    DONE = 6
    FAILED = 7
    ATTACH = 8
    READY = 9
    ROOM = 10
    TAKEN = 11


class Header(NamedTuple):
    """`source` and `number`: whose piece, and which; `nbytes` of payload follow; `digest`: of the bytes that the piece has in the
    region, 0 where none is made. `encoding`: of the payload, see delta.py."""

    kind: int
    encoding: int = 0
    source: int = 0
    number: int = 0
    nbytes: int = 0
    digest: int = 0


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """Who connects: `peer` and `stream`, for the sync of `version`. `attempt` tells two tries of one sync apart."""

    peer: str
    stream: int
    version: int
    attempt: str = ""


class Connection:
    """`whom`: for messages. `introduced`: both ends know each other. `sent`, `received`: bytes, with headers; `waited_s`:
    seconds in calls that send."""

    def __init__(self, sock: socket.socket, seal: Seal, whom: str, timeout_s: float) -> None:
        self._socket, self._seal, self.whom, self._timeout_s = sock, seal, whom, timeout_s
        self._writing = threading.Lock()
        self._over = False
        self.introduced = False
        self._written = self._read = 0
        self._ours, self._theirs = b"<", b">"  # direction, so that no frame can be sent back to its sender
        self.sent = self.received = 0
        self.waited_s = 0.0
        sock.settimeout(None)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # ------------------------------------------------------------ opening

    @classmethod
    def to(
        cls, address: Address, whom: str, seal: Seal, hello: Hello, timeout_s: float,
        opened: Callable[[Connection], None] = lambda _: None,
    ) -> Connection:  # fmt: skip
        """Connect and introduce oneself; the go comes next. `opened`: gets the connection as soon as it can be shut.

        Raises:
            Lost: nobody is there.
        """
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address)
        except OSError as error:
            sock.close()
            raise Lost(f"{whom} cannot be reached: {error.strerror or error}") from None
        self = cls(sock, seal, whom, timeout_s)
        try:
            opened(self)
            opening = self._take(len(_MAGIC) + _NONCE_BYTES)
            if opening[: len(_MAGIC)] != _MAGIC:
                raise Lost(f"{whom} does not speak this version of the weight sync")
            body, nonce = msgspec.msgpack.encode(hello), opening[len(_MAGIC) :]
            self._put([_LENGTH.pack(len(body)), body, seal.code(nonce, body)])
            self._become(seal.of_connection(nonce, body), accepted=False)
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def accepted(cls, sock: socket.socket, seal: Seal, timeout_s: float) -> tuple[Connection, Hello] | None:
        """Who connected; None where it is nobody of ours, or gone already."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self = cls(sock, seal, "whoever connected", timeout_s)
        try:
            self._put([_MAGIC, nonce])
            (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
            if length > _HELLO_BYTES:
                raise Lost("a hello of this size is none")
            body, code = self._take(length), self._take(CODE_BYTES)
            if not seal.is_ours(code, nonce, body):
                raise Lost("not one of ours")
            hello = msgspec.msgpack.decode(body, type=Hello)
            self._become(seal.of_connection(nonce, body), accepted=True)
        except (Lost, msgspec.MsgspecError):
            self.close()
            return None
        self.whom = hello.peer
        return self, hello

    def _become(self, seal: Seal, accepted: bool) -> None:
        self._seal, self.introduced = seal, True
        if accepted:
            self._ours, self._theirs = self._theirs, self._ours

    def wait_for(self, kind: Kind) -> bytes:
        """Its body. Beats are passed over. Raises SyncError with what the other end says, or Lost."""
        while (header := self.read()).kind != kind:
            self.expect_nothing_else(header)
        return self.body(header)

    def go(self, held: Mapping[int, bytes]) -> None:
        """Let the other end send. `held`: the stamps of what is here from those trainer ranks, see delta.py."""
        body = msgspec.msgpack.encode(held)
        self.write(Header(Kind.GO, nbytes=len(body)), [body])

    def wait_for_go(self) -> dict[int, bytes]:
        """What the other end has told with it. Raises as `wait_for`."""
        return msgspec.msgpack.decode(self.wait_for(Kind.GO), type=dict[int, bytes])

    def expect_nothing_else(self, header: Header) -> None:
        """Than a beat. Raises SyncError."""
        if header.kind == Kind.FAILED:
            raise SyncError(self.body(header).decode("utf-8", "replace"))
        if header.kind != Kind.BEAT:
            raise SyncError(f"{self.whom} sent what nobody expected now (frame {header.kind})")

    def is_waiting(self) -> bool:
        """Is there something to read?"""
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
        try:
            return bool(self._socket.recv(1, flags))
        except BlockingIOError:
            return False
        except OSError:
            return False

    def has_news(self) -> bool:
        """Is there something to read, or is it over?"""
        return self._shows(select.POLLIN)

    def has_ended(self) -> bool:
        """Has the other end closed it, whatever lies there to be read?"""
        return self._shows(select.POLLRDHUP)

    def _shows(self, event: int) -> bool:
        try:
            poll = select.poll()
            poll.register(self._socket, event)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    # ------------------------------------------------------------ frames

    def write(self, header: Header, payload: Iterable[memoryview | bytes] = ()) -> None:
        """Raises Lost: the other end is gone, or takes nothing any more."""
        with self._writing:
            self._write(header, payload)

    def _write(self, header: Header, payload: Iterable[memoryview | bytes]) -> None:
        if self._over:
            raise Lost(f"nothing more is sent to {self.whom}")
        self._put([self._sealed(header), *payload])

    def _sealed(self, header: Header) -> bytes:
        plain = _HEADER.pack(header.kind, header.encoding, 0, *header[2:])
        code = self._seal.code(self._ours, self._written.to_bytes(8, "big"), plain)
        self._written += 1
        return plain + code

    def hand(self, header: Header, fd: int, body: bytes) -> None:
        """A frame with a descriptor, to a process of this host."""
        with self._writing:
            self._write(header, ())
            socket.send_fds(self._socket, [b"f"], [fd])
            self._put([body])

    def take_fd(self) -> int:
        """What `hand` sent, after its header."""
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise Lost(f"{self.whom} sent no memory")
        os.set_inheritable(fds[0], False)
        return fds[0]

    def say(self, kind: Kind, text: str = "") -> None:
        body = text.encode()
        self.write(Header(kind, nbytes=len(body)), [body] if body else ())

    def write_no_more(self) -> None:
        """Whoever is about to write gets Lost, so that only `try_to_say` has to wait for the frame that is on its way."""
        self._over = True

    def try_to_say(self, kind: Kind, text: str = "", patience_s: float = 0.0) -> bool:
        """Unless there is no room: then the other end will see it end. False: another thread was in the middle of a frame, also
        after so many seconds, and nothing was said."""
        if not self.introduced:
            return True
        if not self._writing.acquire(timeout=patience_s):
            return False
        try:
            body = text.encode()
            frame = self._sealed(Header(kind, nbytes=len(body))) + body
            if self._socket.send(frame, socket.MSG_DONTWAIT) < len(frame):
                self.shut()
        except OSError:
            pass  # whoever reads will see it
        finally:
            self._writing.release()
        return True

    def read(self) -> Header:
        """The next header.

        Raises:
            Lost: the other end is gone, or silent for too long.
            SyncError: what arrived was not sent on this connection, here.
        """
        data = self._take(_HEADER.size + CODE_BYTES)
        plain = data[: _HEADER.size]
        if not self._seal.is_ours(data[_HEADER.size :], self._theirs, self._read.to_bytes(8, "big"), plain):
            raise SyncError(f"what arrived from {self.whom} is damaged, or was not sent by it")
        self._read += 1
        kind, encoding, _, source, number, nbytes, digest = _HEADER.unpack(plain)
        return Header(kind, encoding, source, number, nbytes, digest)

    def body(self, header: Header) -> bytes:
        if header.nbytes > _BODY_BYTES:
            raise SyncError(f"{self.whom} announces {header.nbytes} bytes where nobody expects as many")
        return self._take(header.nbytes)

    def into(self, views: Iterable[memoryview]) -> None:
        """Fill these with what comes next."""
        left = [view for view in views if len(view)]
        while left:
            try:
                if len(left) == 1:
                    got = self._socket.recv_into(left[0], 0, socket.MSG_WAITALL)
                else:
                    got = self._socket.recvmsg_into(left[:_VECTORS], 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                raise self._lost(error) from None
            if not got:
                raise Lost(f"{self.whom} is gone: its connection ended")
            self.received += got
            left = _after(left, got)

    def _take(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.into([memoryview(data)])
        return bytes(data)

    def _put(self, buffers: Iterable[memoryview | bytes]) -> None:
        left: list[memoryview] = [memoryview(it) for it in buffers if len(it)]
        began = time.perf_counter()
        while left:
            try:
                sent = self._socket.sendmsg(left[:_VECTORS])
            except OSError as error:
                raise self._lost(error) from None
            self.sent += sent
            left = _after(left, sent)
        self.waited_s += time.perf_counter() - began

    def _lost(self, error: OSError) -> Lost:
        if isinstance(error, BlockingIOError):
            return Lost(f"{self.whom} stands still: nothing moved for {self._timeout_s:g} s")
        return Lost(f"{self.whom} is gone: {error.strerror or error}")

    def close(self) -> None:
        """Also wakes a thread that waits in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def shut(self) -> None:
        """As `close`, for another thread than the one that reads: the number of the socket is not given to the next one yet."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the views after their first `nbytes`."""
    for at, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[at + 1 :]]
        nbytes -= len(view)
    return []
