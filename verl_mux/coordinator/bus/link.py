"""One connection to a coordinator: a DEALER socket and a thread that owns it, sends for all, and ticks; `ask` for one question.

Runs in the processes of a job (made by client.py), in agents and commands; opens the socket. ZeroMQ reconnects by itself, each
client after a random time of its own. What cannot be sent waits in the outbox rather than in ZeroMQ's queues, which would hand
on every stale message of a long outage.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.conversation import RECONNECTS_WITHIN_S
from verl_mux.coordinator.bus.curve_keys import ClientKeys, check_port
from verl_mux.errors import UserError

log = logging.getLogger(__name__)

FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_LINGER_MS = 200
_TRY_AGAIN_S = 2.0
_RESTARTED_WITHIN_S = 10.0
# Tries to connect: the first after this, then ever later, each with as much again at random.
_RECONNECT_MS = 100
# What was sent and not even received by the other host's kernel for this long never will be.
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
    if isinstance(message, m.MemoryReport):
        return type(message), message.node, *message.tags
    if isinstance(message, m.HostReport):
        return type(message), message.node
    if isinstance(message, m.Progress):
        return (type(message),)
    return type(message), *(getattr(message, field, None) for field in ("key", "token", "step"))


class Link:
    """connected -> `start()` -> messages go to `receive` in the link's thread -> `close()`.

    `tick` is called in that thread once per `interval` seconds.
    """

    def __init__(self, address: str, identity: str, receive: Callable[[m.AnyMessage], None], tick: Callable[[], None],
                 interval: float, keys: ClientKeys | None):  # fmt: skip
        """Raises UserError when the address is not one."""
        self._receive, self._tick, self._interval = receive, tick, interval
        self._outbox, self._outbox_lock = Outbox(), threading.Lock()
        self._context = zmq.Context()
        self._address = address
        self._dealer = dealer(self._context, identity, keys, immediate=True)
        self._handshake = Handshake(self._dealer, address, keys, _RESTARTED_WITHIN_S)
        try:
            connect_to(address, self._dealer)
        except UserError:
            self._handshake.close()
            self._context.destroy(linger=0)
            raise
        self._ring_lock = threading.Lock()
        self._bell, self._ringer = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._bell.bind(f"inproc://{identity}")
        self._ringer.connect(f"inproc://{identity}")
        self._refused: str | None = None
        self._try_again_at = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="verl-mux-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: m.Message) -> None:
        """From any thread; never blocks."""
        with self._outbox_lock:
            self._outbox.put(message)
        self._ring()

    def close(self) -> None:
        """What was sent before is still handed to the network, if that is there."""
        if self._closing:
            return
        self._closing = True
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _ring(self) -> None:
        with self._ring_lock, contextlib.suppress(zmq.Again):  # the bell's queue is full: it will be heard
            if not self._ringer.closed:
                self._ringer.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._handshake.monitor, zmq.POLLIN)
        next_tick = time.monotonic()
        while not self._closing:
            poller.register(self._dealer, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
            ready = dict(poller.poll(int(max(0.0, next_tick - time.monotonic()) * 1000)))
            if self._bell in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._bell.recv(zmq.NOBLOCK)
            if ready.get(self._dealer, 0) & zmq.POLLIN:
                self._read()
            if self._handshake.monitor in ready:
                self._look_at_handshake()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + self._interval
                self._tick()
                self._pass_on_refusal()
            self._flush()
        self._flush()
        self._handshake.close()
        with self._ring_lock:
            self._context.destroy(linger=_LINGER_MS)

    def _read(self) -> None:
        try:
            self._receive(m.decode(self._dealer.recv()))
        except m.Unreadable as error:
            log.warning("the coordinator sent what this client cannot read: %s", error)

    def _look_at_handshake(self) -> None:
        self._refused = self._handshake.refusal()
        self._try_again_at = time.monotonic() + _TRY_AGAIN_S
        if self._refused is not None and self._handshake.has_succeeded:
            log.warning("%s", self._refused)

    def _pass_on_refusal(self) -> None:
        """At the start it is an answer like any other. Later the coordinator may yet come back with the keys it had, and ZeroMQ
        does not try again by itself."""
        if self._refused is None:
            return
        if not self._handshake.has_succeeded:
            self._receive(m.Refused(about="register", reason=self._refused))
        elif time.monotonic() >= self._try_again_at:
            with contextlib.suppress(zmq.ZMQError):  # it has given this connection up already
                self._dealer.disconnect(self._address)
            self._dealer.connect(self._address)
            self._try_again_at = time.monotonic() + _TRY_AGAIN_S

    def _flush(self) -> None:
        with self._outbox_lock:
            while (message := self._outbox.take()) is not None:
                try:
                    self._dealer.send(m.encode(message), zmq.NOBLOCK)
                except zmq.Again:  # not connected
                    self._outbox.put_back(message)
                    return


def ask(address: str, message: m.Message, timeout: float, keys: ClientKeys | None) -> m.AnyMessage | None:
    """One question, one answer, no thread; None when no answer comes within `timeout` seconds.

    Raises UserError when the coordinator refuses these keys.
    """
    with zmq.Context() as context:
        socket = dealer(context, None, keys)
        handshake = Handshake(socket, address, keys)
        try:
            connect_to(address, socket)
            socket.send(m.encode(message))
            return m.decode(socket.recv()) if _wait_for(socket, handshake, timeout) else None
        finally:
            handshake.close()
            socket.close(linger=0)


def _wait_for(socket: zmq.Socket, handshake: Handshake, timeout: float) -> bool:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(handshake.monitor, zmq.POLLIN)
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        if socket in dict(poller.poll(int(left * 1000) + 1)):
            return True
        if reason := handshake.refusal():
            raise UserError(reason)
    return False


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


class Handshake:
    """Why a client's connection does not come about: ZeroMQ reports it to a monitor alone, and tries again for ever.

    `monitor` can be polled; `refusal()` says in words why the connection is refused, or None. A coordinator with another key
    breaks off without a reason, and so does one that is just being restarted: for `patience_s` it counts as the latter.
    """

    def __init__(self, socket: zmq.Socket, address: str, keys: ClientKeys | None, patience_s: float = 0.0):
        self._socket, self._address, self._keys, self._patience_s = socket, address, keys, patience_s
        self.monitor = socket.get_monitor_socket(FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._broken_off, self._broken_since = 0, 0.0
        self.has_succeeded = False

    def refusal(self) -> str | None:
        reason = None
        for event, value in pending(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._broken_off, reason, self.has_succeeded = 0, None, True
            else:
                reason = self._in_words(event, value)
        return reason

    def close(self) -> None:
        self._socket.disable_monitor()
        self.monitor.close(linger=0)

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


def pending(monitor: zmq.Socket) -> list[tuple[int, int]]:
    """The events that have come: (event, value)."""
    events = []
    while monitor.poll(0):
        event = recv_monitor_message(monitor)
        events.append((event["event"], event["value"]))
    return events
