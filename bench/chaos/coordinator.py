"""The coordinator of a schedule, in a process of its own: the product's, which dies at the point given.

python -m bench.chaos.coordinator FOLDER PORT PLANTED DIE_AT: DIE_AT is TYPE:POINT:COUNT (see `faults.py`) or empty.
PLANTED faults must be noticed: `journal skipped` writes nothing down and says it did; `early grant` gives nodes to several.
Started by schedule.py; touches its folder, its port and itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.chaos.driver import NODES
from bench.chaos.faults import LEASE_S
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator


def main() -> None:
    folder, port, planted, die_at = Path(sys.argv[1]), *sys.argv[2:]
    mode = "uncoordinated" if planted == "early grant" else "interleaved"
    pools = {name: {"nodes": [{"name": node} for node in nodes]} for name, nodes in NODES.items()}
    config = make_config({"pools": pools, "schedule": [{"mode": mode}], "lease_timeout": LEASE_S, "kill_grace": 0.5})
    service = _Mortal(config, folder / "journal", f"tcp://127.0.0.1:{port}", die_at=die_at)
    if planted == "journal skipped":
        service.skip_journal()
    service.up = folder / f"up.{os.getpid()}"
    service.start()
    service.up.touch()
    enough = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: enough.set())
    service.wait(enough)
    service.stop()


class _Mortal(Coordinator):
    up: Path

    def __init__(self, *arguments: Any, die_at: str) -> None:
        super().__init__(*arguments)
        self._type, self._point, count = die_at.split(":") if die_at else ("", "", "0")
        self._left = int(count)
        self._journal.commit = self._dying_after(self._journal.commit)  # type: ignore[method-assign]

    def skip_journal(self) -> None:
        self._journal.append = lambda *_: None  # type: ignore[method-assign]

    def _answer(self, identity: bytes, role: str, message: m.AnyMessage) -> None:
        if message.__struct_config__.tag == self._type:
            self._left -= 1
        self._maybe_die("received")
        super()._answer(identity, role, message)

    def _send(self, identity: bytes, message: m.Message) -> None:
        super()._send(identity, message)
        self._maybe_die("sent")

    def _dying_after(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            found = write(*arguments)
            self._maybe_die("written")
            return found

        return wrapped

    def _maybe_die(self, point: str) -> None:
        if self._type and self._point == point and self._left <= 0:
            self.up.touch()  # it listens, though its main thread may not have said so yet
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
