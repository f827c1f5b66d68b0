"""One stream between two ends of a sync: a TCP or local connection that carries frames of a header and payload.

    connecting end:              hello -->                    manifests -->                  frames of pieces -->
    accepting end:    nonce -->          go (or failed) -->               beats, room -->             beats, then done -->

Either end may report a failure instead. Nothing is sent between manifests and room; while the accepting end makes room for the
model, its beats show that it is alive.

Runs in trainer workers and rollout workers; called by sending.py and receiving.py; touches its socket only. Sockets block, with
the kernel's time limits, and a payload goes between socket and memory without a copy. One thread reads a connection; several may
write. Each header carries a code that only processes of the job can make (keyed BLAKE2b); nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from verl_mux.sync.layout import Lost, SyncError

CODE_BYTES = 16
_MAGIC = b"VMX7"
_NONCE_BYTES = 16
_LENGTH = struct.Struct("!I")
_HEADER = struct.Struct("!BBHIQQQ")
# Of a hello, which any process that reaches the socket may send; of a text or a manifest, which come from the job's processes.
_HELLO_BYTES, _BODY_BYTES = 4096, 1 << 30
# Vectors that one call takes.
_VECTORS = 512
Address = str | tuple[str, int]


def new_key() -> bytes:
    return secrets.token_bytes(32)


class Seal:
    """Makes and checks the codes of frames: a keyed BLAKE2b digest, with a key of its own for each connection.

    The trainer draws the job's key with the plan and hands it out over Ray, so it is in no configuration and no log. It keeps out
    processes that reach the sockets, and frames recorded on another connection; not an attacker who changes packets on their way.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of_connection(self, *known_to_both: bytes) -> Seal:
        """The seal of one connection, derived from values that only its two ends share."""
        return Seal(self._digest(known_to_both, 32))

    def code(self, *parts: bytes) -> bytes:
        return self._digest(parts, CODE_BYTES)

    def is_ours(self, code: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(code, self.code(*parts))

    def _digest(self, parts: tuple[bytes, ...], nbytes: int) -> bytes:
        hasher = hashlib.blake2b(digest_size=nbytes, key=self._key)
        for part in parts:
            hasher.update(len(part).to_bytes(8, "big"))
            hasher.update(part)
        return hasher.digest()


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
    """`source` and `number`: trainer rank and number of a piece; `nbytes` of payload follow; `digest`: of the bytes that the
    piece has in the region, 0 where none is made; `encoding`: of the payload, see remote_reads.py."""

    kind: int
    encoding: int = 0
    source: int = 0
    number: int = 0
    nbytes: int = 0
    digest: int = 0


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The connecting end: its name `peer`, its `stream`, the sync's `version`; `attempt` tells two tries of one sync apart."""

    peer: str
    stream: int
    version: int
    attempt: str = ""


class Connection:
    """`whom`: name of the other end, for messages. `introduced`: hello and nonce are exchanged. `is_local`: within this
    host. `sent`, `received`: bytes, with headers; `waited_s`: seconds in calls that send."""

    def __init__(self, sock: socket.socket, seal: Seal, whom: str, timeout_s: float) -> None:
        self._socket, self._seal, self.whom, self._timeout_s = sock, seal, whom, timeout_s
        self._writing = threading.Lock()
        self._over = False
        self.introduced = False
        self.is_local = sock.family == socket.AF_UNIX
        self._written = self._read = 0
        self._ours, self._theirs = b"<", b">"  # direction, so that no frame can be sent back to its sender
        self.sent = self.received = 0
        self.waited_s = 0.0
        sock.settimeout(None)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if not self.is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # ------------------------------------------------------------ opening

    @classmethod
    def to(
        cls, address: Address, whom: str, seal: Seal, hello: Hello, timeout_s: float,
        opened: Callable[[Connection], None] = lambda _: None,
    ) -> Connection:  # fmt: skip
        """Connect and send the hello; the go comes next. `opened`: gets the connection as soon as it can be shut. Raises Lost."""
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
        """The connection and its hello; None where the peer lacks the job's key, or is gone already."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self = cls(sock, seal, "a new connection", timeout_s)
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
        """Return the body of the next frame of `kind`, passing over beats. Raises SyncError with the other end's reason, or
        Lost."""
        while (header := self.read()).kind != kind:
            self.expect_nothing_else(header)
        return self.body(header)

    def expect_nothing_else(self, header: Header) -> None:
        """Raise SyncError unless the frame is a beat: with the other end's reason where it failed."""
        if header.kind == Kind.FAILED:
            raise SyncError(self.body(header).decode("utf-8", "replace"))
        if header.kind != Kind.BEAT:
            raise SyncError(f"{self.whom} sent an unexpected frame ( {header.kind})")

    def has_news(self) -> bool:
        """Is there something to read, or is it over?"""
        return self._shows(select.POLLIN)

    def has_ended(self) -> bool:
        """Has the other end closed the connection, even if data is left to be read?"""
        return self._shows(select.POLLRDHUP)

    def _shows(self, event: int) -> bool:
        try:
            poll = select.poll()
            poll.register(self._socket, event)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    # ------------------------------------------------------------ frames

    def write(self, header: Header, payload: Iterable[memoryview | bytes] = (), fd: int | None = None) -> None:
        """`fd`: a file descriptor for a process of this host, sent between the header and the payload; see `take_fd`. Raises
        Lost: the other end is gone, or takes nothing for `timeout_s`."""
        with self._writing:
            if self._over:
                raise Lost(f"nothing more is sent to {self.whom}")
            if fd is not None:
                self._put([self._sealed(header)])
                socket.send_fds(self._socket, [b"f"], [fd])
                self._put(payload)
            else:
                self._put([self._sealed(header), *payload])

    def _sealed(self, header: Header) -> bytes:
        plain = _HEADER.pack(header.kind, header.encoding, 0, *header[2:])
        code = self._seal.code(self._ours, self._written.to_bytes(8, "big"), plain)
        self._written += 1
        return plain + code

    def take_fd(self) -> int:
        """Receive the descriptor that `write` sent, after its header."""
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise Lost(f"{self.whom} sent no memory")
        os.set_inheritable(fds[0], False)
        return fds[0]

    def say(self, kind: Kind, text: str = "") -> None:
        body = text.encode()
        self.write(Header(kind, nbytes=len(body)), [body] if body else ())

    def write_no_more(self) -> None:
        """Let later writes raise Lost, so that `try_to_say` waits for the frame in progress only."""
        self._over = True

    def try_to_say(self, kind: Kind, text: str = "", patience_s: float = 0.0) -> bool:
        """Send without blocking; where the socket is full, shut it. False: another thread was in the middle of a frame for
        `patience_s`, and nothing was sent."""
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
            pass  # the reading thread will see it
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
            raise SyncError(f"{self.whom} announces {header.nbytes} bytes, too many for such a frame")
        return self._take(header.nbytes)

    def into(self, views: Iterable[memoryview]) -> None:
        """Fill the views with the next bytes. Raises Lost."""
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
        self.shut()
        self._socket.close()

    def shut(self) -> None:
        """As `close`, for threads that do not read it: the descriptor's number is not reused yet."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The views without their first `nbytes`."""
    for at, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[at + 1 :]]
        nbytes -= len(view)
    return []
