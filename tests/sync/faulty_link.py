"""A TCP link that fails as it is told to, between senders and one worker."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import NamedTuple


class Fault(NamedTuple):
    """On connection `connection` (as they are made; None: on each) after `after` bytes towards the worker: "cut" ends it,
    "stall" lets nothing more through, "flip" turns a bit, "late" opens it after a while, "double" makes a second one that says
    the same."""

    kind: str
    connection: int | None
    after: int


class FaultyLink:
    """Listens at `address` and passes on to `to`. `reached`: the fault has come; `unstall`: what stands still goes on."""

    def __init__(self, to: tuple[str, int], fault: Fault | None) -> None:
        self._to, self._fault = to, fault
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._sockets: list[socket.socket] = []
        self._made = 0
        self.unstall, self.reached = threading.Event(), threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._join, args=(near, self._made), daemon=True).start()
                self._made += 1

    def _join(self, near: socket.socket, number: int) -> None:
        fault = self._fault if self._fault and self._fault.connection in (number, None) else None
        if fault and fault.kind == "late":
            threading.Event().wait(0.1)
        with contextlib.suppress(OSError):
            far = socket.create_connection(self._to)
            self._sockets += [near, far]
            double = None
            if fault and fault.kind == "double":
                double = socket.create_connection(self._to)
                self._sockets.append(double)
            threading.Thread(target=self._pass, args=(far, near, None, None), daemon=True).start()
            self._pass(near, far, fault, double)

    def _pass(self, one: socket.socket, other: socket.socket, fault: Fault | None, double: socket.socket | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(one.recv(8192)):
                if fault and passed + len(data) > fault.after and fault.kind in ("cut", "stall", "flip"):
                    self.reached.set()
                    if fault.kind == "cut":
                        break
                    if fault.kind == "stall":
                        self.unstall.wait(60.0)
                    else:
                        data[max(fault.after - passed, 0)] ^= 4
                    fault = None
                passed += len(data)
                other.sendall(data)
                if double is not None:
                    with contextlib.suppress(OSError):
                        double.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.unstall.set()
        for end in (self._listener, *self._sockets):
            end.close()
