"""The coordinator's end of the bus: a ROUTER socket, and the gate that only clients with a key of its folder pass.

Runs in the coordinator's loop; made by server.py; knows frames, not what they mean. Takes frames in batches, since waking the
loop costs more than reading one. A client that connects again takes its name over from the connection it lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq
import zmq.auth.asyncio
from zmq.utils import z85

from verl_mux.coordinator.bus import limits
from verl_mux.coordinator.bus.curve_keys import ServerKeys
from verl_mux.coordinator.bus.link import FAILURES, pending
from verl_mux.errors import UserError


def _reason(event: int, value: int) -> str:
    """A client that breaks off before it shows a key counts as one without. A connection that is sent again looks like one made
    for another server: it opens, and then goes on with frames that do not fit."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "unknown key"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "no key"
    return "replayed" if value == zmq.PROTOCOL_ERROR_ZMTP_INVALID_SEQUENCE else "made for another key, or replayed"


class Gate:
    """locked, before the socket is bound -> `close()`, before its context is destroyed. `refused(reason)` for each refusal."""

    def __init__(self, context: zmq.Context, socket: zmq.Socket, keys: ServerKeys, refused: Callable[[str], None]) -> None:
        self._socket, self._refused = socket, refused
        self._roles = _Roles(context, keys.roles)
        self._roles.start()
        socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, keys.public, keys.secret
        self._monitor = socket.get_monitor_socket(FAILURES)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._monitor.fileno(), self._count)
        self._count()  # the descriptor is edge-triggered: only after the monitor was empty does it wake the loop

    def close(self) -> None:
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._roles.stop()

    def _count(self) -> None:
        for event, value in pending(self._monitor):
            self._refused(_reason(event, value))


class _Roles(zmq.auth.asyncio.AsyncioAuthenticator):
    """Answers libzmq's question about a client's public key (ZAP): whether it may connect, and what it is called then."""

    def __init__(self, context: zmq.Context, roles: dict[bytes, str]) -> None:
        super().__init__(context)
        self._roles = roles
        self.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._roles

    def curve_user_id(self, client_public_key: bytes) -> str:
        return self._roles[z85.encode(client_public_key)]


# Frames taken before others in the loop have their turn.
_BATCH = 64
# Connections that wait to be accepted. ZeroMQ's 100 are too few when all jobs come back at once: the kernel drops the others,
# which try again after 1, 3, 7, 15... seconds. It takes no more than its own limit (net.core.somaxconn).
_BACKLOG = 2**16 - 1
# Plain numbers: ZeroMQ's flags are enumerations, which cost more to put together than a frame to send.
_AT_ONCE = int(zmq.NOBLOCK)
_FIRST_OF_SEVERAL = int(zmq.NOBLOCK | zmq.SNDMORE)


class Router:
    """bound, in the loop's thread -> `take(identity, role, frame)` is called for each frame -> `close()`. `refused(reason)`: for
    each connection, or frame on one, that goes no further than here."""

    def __init__(self, bind: str, keys: ServerKeys, take: Callable[[bytes, str, bytes], None],
                 refused: Callable[[str], None]) -> None:  # fmt: skip
        """Raises UserError when the address cannot be bound."""
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 500
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, limits.QUEUE_PER_CLIENT)
        self._socket.setsockopt(zmq.RCVHWM, limits.UNREAD_PER_CLIENT)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._gate = Gate(self._context, self._socket, keys, refused)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._gate.close()
            self._context.destroy()
            raise UserError(f"cannot bind {bind!r}: {error}; expected a free tcp://HOST:PORT") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._scheduled = False
        self._loop.add_reader(self._socket.fileno(), self._pump)
        self._pump_soon()

    def send(self, identity: bytes, frame: bytes) -> None:
        """Goes out at once, or is queued by ZeroMQ; dropped if the client is not connected or does not read."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(identity, _FIRST_OF_SEVERAL)
            self._socket.send(frame, _AT_ONCE)
        # Sending may have taken the socket's wake-up for what has arrived meanwhile.
        self._pump_soon()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._gate.close()
        self._context.destroy(linger=500)

    def _pump_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        if self._socket.closed:
            return
        for _ in range(_BATCH):
            try:
                identity = self._socket.recv(_AT_ONCE, copy=False)  # only so it carries the role
            except zmq.Again:
                return
            self._take(identity.bytes, str(identity["User-Id"]), self._said_with(identity))
        self._pump_soon()

    def _said_with(self, identity: zmq.Frame) -> bytes:
        """The frame that follows; further ones, which no client of ours sends, are dropped."""
        frame = said = self._socket.recv(_AT_ONCE, copy=False) if identity.more else None
        while frame is not None and frame.more:
            frame = self._socket.recv(_AT_ONCE, copy=False)
        return said.bytes if said is not None else b""
