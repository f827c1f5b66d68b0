"""One connection to a coordinator: a DEALER socket and a thread that owns it, sends for all, and beats every second.

ZeroMQ reconnects by itself. Nothing here knows what the messages mean.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable

import zmq

from verl_mux.coordinator import messages as m
from verl_mux.errors import UserError

log = logging.getLogger(__name__)

_LINGER_MS = 200


class Link:
    """connected -> `start()` -> messages go to `receive` in the link's thread -> `close()`.

    `beat` is called in that thread once per `interval` seconds and gives the message to send then, or None.
    """

    def __init__(self, address: str, identity: str, receive: Callable[[m.Message], None], beat, interval: float = 1.0):
        """Raises UserError when the address is not one."""
        self._receive, self._beat, self._interval = receive, beat, interval
        self._outbox: collections.deque[bytes] = collections.deque()
        self._context = zmq.Context()
        self._dealer = _dealer(self._context, address, identity)
        bell = f"inproc://{identity}"
        self._ring_lock = threading.Lock()
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.bind(bell)
        self._ringer = self._context.socket(zmq.PAIR)
        self._ringer.connect(bell)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="verl-mux-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: m.Message) -> None:
        """From any thread; never blocks."""
        self._outbox.append(m.encode(message))
        self._ring()

    def close(self) -> None:
        """What was sent before is still handed to the network, if it is there."""
        if self._closing:
            return
        self._closing = True
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _ring(self) -> None:
        with self._ring_lock, contextlib.suppress(zmq.Again):  # so many rings wait already that one is heard
            if not self._ringer.closed:
                self._ringer.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        next_beat = time.monotonic()
        while not self._closing:
            ready = dict(poller.poll(max(0.0, next_beat - time.monotonic()) * 1000))
            if self._bell in ready:
                self._silence_bell()
            if self._dealer in ready:
                self._read()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._interval
                if message := self._beat():
                    self._outbox.append(m.encode(message))
            self._flush()
        self._flush()
        with self._ring_lock:
            self._context.destroy(linger=_LINGER_MS)

    def _silence_bell(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._bell.recv(zmq.NOBLOCK)

    def _read(self) -> None:
        try:
            self._receive(m.decode(self._dealer.recv()))
        except m.WrongVersion as error:
            log.warning("the coordinator sent what this client cannot read: %s", error)

    def _flush(self) -> None:
        while self._outbox:
            try:
                self._dealer.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return  # the queue towards an absent coordinator is full; the next beat tries again
            self._outbox.popleft()


def ask(address: str, message: m.Message, timeout: float) -> m.Message | None:
    """One question, one answer, no thread; None when no answer comes within `timeout` seconds."""
    with zmq.Context() as context:
        dealer = _dealer(context, address, identity=None)
        try:
            dealer.send(m.encode(message))
            return m.decode(dealer.recv()) if dealer.poll(timeout * 1000) else None
        finally:
            dealer.close(linger=0)


def _dealer(context: zmq.Context, address: str, identity: str | None) -> zmq.Socket:
    dealer = context.socket(zmq.DEALER)
    if identity:
        dealer.setsockopt(zmq.IDENTITY, identity.encode())
    dealer.setsockopt(zmq.HEARTBEAT_IVL, 2000)  # notices a connection that died without a word
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.close(linger=0)
        raise UserError(f"coordinator address {address!r} is not usable ({error}); expected tcp://HOST:PORT") from error
    return dealer
