"""The lock on the coordinator's socket: only who has a key of its folder connects, and the connection carries the key's role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
import zmq.auth.asyncio
from zmq.utils import z85

from verl_mux.coordinator.bus.access.handshake import FAILURES, pending
from verl_mux.coordinator.bus.access.keys import ServerKeys


def _reason(event: int, value: int) -> str:
    """Who breaks off before showing a key has shown none: a client without one may be gone before it is looked at. A connection
    that is sent again looks like one made for another server: it opens, and then goes on with what does not fit."""
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
        self._count()  # only who has found it empty is woken by what comes

    def close(self) -> None:
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._roles.stop()

    def _count(self) -> None:
        for event, value in pending(self._monitor):
            self._refused(_reason(event, value))


def role_of(frame: zmq.Frame) -> str:
    """Of whoever sent it."""
    return str(frame["User-Id"])


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
