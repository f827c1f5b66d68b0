"""Both ends of a connection to a coordinator: `Link` and `ask` for its clients, `Router` in the coordinator.

Link runs in the processes of a job, in agents and commands, with a thread that owns its socket; made by client.py, agent.py and
`ask`. Router runs in the coordinator's loop; made by server.py. Both open sockets and know frames, not what follows from them.
ZeroMQ connects again by itself, each client after a random time of its own. What cannot be sent waits in the outbox, not in
ZeroMQ's queues, which would hand on every stale message of a long outage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable

import zmq
import zmq.auth.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.conversation import RECONNECTS_WITHIN_S
from verl_mux.coordinator.bus.curve_keys import ClientKeys, ServerKeys, check_port
from verl_mux.errors import UserError

log = logging.getLogger(__name__)

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
TICK_S = 0.25
_LINGER_MS = 200
_TRY_AGAIN_S = 2.0
# A coordinator with another key breaks off without a reason, and so does one that is just being restarted.
_RESTARTED_WITHIN_S = 10.0
# Between tries to connect: this at first, then ever longer, each with as much again at random.
_RECONNECT_MS = 100
# What the other host's kernel has not even received after this time never arrives.
_DEAD_AFTER_MS = 5000


class Outbox:
    """Messages in the order in which they are to be sent. A later one about the same thing takes an earlier one's place, so an
    outage of an hour leaves one heartbeat and one progress behind it, not thousands."""

    def __init__(self) -> None:
        self._messages: dict[tuple[object, ...], m.Message] = {}

    def put(self, message: m.Message) -> None:
        self._messages.pop(_subject(message), None)
        self._messages[_subject(message)] = message

    def take(self) -> m.Message | None:
        return self._messages.pop(next(iter(self._messages))) if self._messages else None

    def put_back(self, message: m.Message) -> None:
        """A message that was taken and could not be sent is the first again, unless a newer one has taken its place meanwhile."""
        self._messages = {_subject(message): message, **self._messages}

    def __len__(self) -> int:
        return len(self._messages)


def _subject(message: m.Message) -> tuple[object, ...]:
    """Of questions their key or token, of steps their number, of reports on memory what they report on."""
    if isinstance(message, (m.MemoryReport, m.HostReport)):
        return type(message), message.node, *getattr(message, "tags", ())
    fields = () if isinstance(message, m.Progress) else ("key", "token", "step")
    return type(message), *(getattr(message, field, None) for field in fields)


class Link:
    """made -> `start()` -> messages go to `receive`, and `tick` is called every TICK_S, in the link's thread -> `close()`.

    A refusal of these keys goes to `receive` as one of a registration, until the first connection has succeeded; `refused` is
    its reason.
    """

    def __init__(self, address: str, identity: str, receive: Callable[[m.AnyMessage], None], keys: ClientKeys | None,
                 tick: Callable[[], None] = lambda: None, patience_s: float | None = None):  # fmt: skip
        """`patience_s`: how long a coordinator that breaks off counts as one that is being restarted; default: 10 s.

        Raises UserError when the address is not one.
        """
        self._address, self._receive, self._keys, self._tick = address, receive, keys, tick
        self._patience_s = _RESTARTED_WITHIN_S if patience_s is None else patience_s
        self.refused: str | None = None
        self._outbox, self._lock = Outbox(), threading.Lock()
        self._has_connected = False
        self._broken_off, self._broken_since, self._try_again_at = 0, 0.0, 0.0
        self._context = zmq.Context()
        self._socket = dealer(self._context, identity, keys, immediate=True)
        self._monitor = self._socket.get_monitor_socket(_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            connect_to(address, self._socket)
        except UserError:
            self._destroy(0)
            raise
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="verl-mux-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: m.Message) -> None:
        """From any thread; never blocks."""
        with self._lock:
            self._outbox.put(message)
            self._ring()

    def close(self) -> None:
        """What was sent before is still handed to the network, if that is there."""
        with self._lock:
            self._is_closing = True
            self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _ring(self) -> None:
        if not self._is_closed:
            os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        next_tick = time.monotonic()
        while not self._is_closing:
            poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
            ready = dict(poller.poll(int(max(0.0, next_tick - time.monotonic()) * 1000)))
            if self._bell in ready:
                os.eventfd_read(self._bell)
            if ready.get(self._socket, 0) & zmq.POLLIN:
                self._read()
            if self._monitor in ready:
                self._look_at_handshakes()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self._tick()
                self._pass_on_refusal()
            self._flush()
        self._flush()
        with self._lock:
            self._is_closed = True
            os.close(self._bell)
        self._destroy(_LINGER_MS)

    def _destroy(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=linger_ms)

    def _read(self) -> None:
        try:
            self._receive(m.decode(self._socket.recv()))
        except m.Unreadable as error:
            log.warning("the coordinator sent what this client cannot read: %s", error)

    def _flush(self) -> None:
        with self._lock:
            while (message := self._outbox.take()) is not None:
                try:
                    self._socket.send(m.encode(message), zmq.NOBLOCK)
                except zmq.Again:  # not connected
                    return self._outbox.put_back(message)

    # --- refused connections, which ZeroMQ reports to a monitor alone ---

    def _look_at_handshakes(self) -> None:
        self.refused, self._try_again_at = None, time.monotonic() + _TRY_AGAIN_S
        for event, value in pending(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._broken_off, self.refused, self._has_connected = 0, None, True
            else:
                self.refused = self._in_words(event, value)
        if self.refused is not None and self._has_connected:
            log.warning("%s", self.refused)

    def _pass_on_refusal(self) -> None:
        """At the start it is an answer like any other. Later the coordinator may yet come back with the keys it had, and ZeroMQ
        does not try again by itself."""
        if self.refused is None:
            return
        if not self._has_connected:
            self._receive(m.Refused(about="register", reason=self.refused))
        elif time.monotonic() >= self._try_again_at:
            with contextlib.suppress(zmq.ZMQError):  # it has given this connection up already
                self._socket.disconnect(self._address)
            self._socket.connect(self._address)
            self._try_again_at = time.monotonic() + _TRY_AGAIN_S

    def _in_words(self, event: int, value: int) -> str | None:
        at = f"the coordinator at {self._address}"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"{at} does not know {self._keys.source if self._keys else 'this key'}: name the folder it was started with"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if self._keys is not None:
                return f"{at} takes no keys: it is another program, or of an older version"
            return f"{at} wants a key: name the folder it was started with by --keys DIR, mux.keys=DIR or VERL_MUX_KEYS"
        if self._broken_off == 0:
            self._broken_since = time.monotonic()
        self._broken_off += 1
        if self._broken_off < 2 or self._keys is None or time.monotonic() - self._broken_since < self._patience_s:
            return None
        return f"{at} has another key than {self._keys.source.parent / 'server.key'}: name the folder it was started with"


def ask(address: str, message: m.Message, timeout: float, keys: ClientKeys | None) -> m.AnyMessage | None:
    """One question, one answer; None when no answer comes within `timeout` seconds.

    Raises UserError when the coordinator refuses these keys.
    """
    answers: queue.SimpleQueue[m.AnyMessage] = queue.SimpleQueue()
    link = Link(address, f"ask-{uuid.uuid4().hex}", answers.put, keys, patience_s=0.0)
    link.send(message)
    link.start()
    try:
        answer = answers.get(timeout=timeout)
    except queue.Empty:
        return None
    finally:
        link.close()
    if link.refused is not None:
        raise UserError(link.refused)
    return answer


def dealer(context: zmq.Context, identity: str | None, keys: ClientKeys | None, immediate: bool = False) -> zmq.Socket:
    """Not yet connected. immediate: only what can be sent now is taken."""
    socket = context.socket(zmq.DEALER)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity.encode())
    if keys is not None:
        keys.apply(socket)
    # The kernel notices a connection that died silently, since a client speaks every second. ZeroMQ's own heartbeats would take
    # a process that is short of processor time for a dead one, and all that connect again would slow the next.
    socket.setsockopt(zmq.TCP_MAXRT, _DEAD_AFTER_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _DEAD_AFTER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, round(RECONNECTS_WITHIN_S * 1000))
    socket.setsockopt(zmq.IMMEDIATE, immediate)
    return socket


def connect_to(address: str, socket: zmq.Socket) -> None:
    check_port(address)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise UserError(f"coordinator address {address!r} is not usable ({error}); expected tcp://HOST:PORT") from error


def pending(monitor: zmq.Socket) -> list[tuple[int, int]]:
    """The events that have come: (event, value)."""
    events = []
    while monitor.poll(0):
        event = recv_monitor_message(monitor)
        events.append((event["event"], event["value"]))
    return events


# --- the coordinator's end ---

# Frames taken before others in the loop have their turn.
_BATCH = 64
# Connections that wait to be accepted. ZeroMQ's 100 are too few when all jobs come back at once: the kernel drops the others,
# which try again after 1, 3, 7, 15... seconds. It takes no more than its own limit (net.core.somaxconn).
_BACKLOG = 2**16 - 1
_HANDSHAKE_MS = 5000  # a connection that has not shown a key by then is closed: each is an open file


class _Roles(zmq.auth.asyncio.AsyncioAuthenticator):
    """Answers libzmq's question about a client's public key (ZAP): whether it may connect, and its role."""

    def __init__(self, context: zmq.Context, roles: dict[bytes, str]) -> None:
        super().__init__(context)
        self._roles = roles
        self.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._roles

    def curve_user_id(self, client_public_key: bytes) -> str:
        return self._roles[z85.encode(client_public_key)]


class Router:
    """A ROUTER socket that only clients with a key of the coordinator's folder reach.

    bound, in the loop's thread -> `take(identity, role, frame)` is called for each frame -> `close()`. A client that connects
    again takes its name over from the connection it lost. Frames are taken in batches: waking the loop costs more than reading
    one.
    """

    def __init__(self, bind: str, keys: ServerKeys, take: Callable[[bytes, str, bytes], None]) -> None:
        """Raises UserError when the address cannot be bound."""
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, m.QUEUE_PER_CLIENT)
        self._socket.setsockopt(zmq.RCVHWM, m.UNREAD_PER_CLIENT)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._socket.curve_server, self._socket.curve_publickey, self._socket.curve_secretkey = True, keys.public, keys.secret
        self._roles = _Roles(self._context, keys.roles)
        self._roles.start()
        self._scheduled = False
        # The descriptor is edge-triggered: only after all was read does it wake the loop.
        self._loop.add_reader(self._socket.fileno(), self._pump)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise UserError(f"cannot bind {bind!r}: {error}; expected a free tcp://HOST:PORT") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._pump_soon()

    def send(self, identity: bytes, frame: bytes) -> None:
        """Goes out at once, or is queued by ZeroMQ; dropped if the client is not connected or does not read."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        # Sending may have taken the socket's wake-up for what has arrived meanwhile.
        self._pump_soon()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._roles.stop()
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
                identity = self._socket.recv(zmq.NOBLOCK, copy=False)  # only so it carries the role
            except zmq.Again:
                return
            frame = said = self._socket.recv(zmq.NOBLOCK, copy=False) if identity.more else None
            while frame is not None and frame.more:  # no client of ours sends further ones: dropped
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            self._take(identity.bytes, str(identity["User-Id"]), said.bytes if said is not None else b"")
        self._pump_soon()
