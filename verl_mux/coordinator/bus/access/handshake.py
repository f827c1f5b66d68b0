"""Why a connection does not come about: ZeroMQ tells it only to who watches the socket, and tries again for ever."""

from __future__ import annotations

import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from verl_mux.coordinator.bus.access.keys import ClientKeys

FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def pending(monitor: zmq.Socket) -> list[tuple[int, int]]:
    """The events that have come: (event, value)."""
    found = []
    while monitor.poll(0):
        event = recv_monitor_message(monitor)
        found.append((event["event"], event["value"]))
    return found


class Handshake:
    """Watches a client's connection. `monitor` can be polled; `refusal()` says in words why it is refused, or None.

    A coordinator with another key breaks off without a word, and so does one that is just being restarted: for `patience_s` it is
    taken for the latter.
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
