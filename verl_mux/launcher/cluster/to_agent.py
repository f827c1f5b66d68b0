"""`python -m verl_mux.launcher.cluster.to_agent SPEC`: the launcher's machine's end of the agent on a host.

Starts `host_agent` there and holds its stdin open, which is all that keeps it: until this ends, by a signal or otherwise.
Where the way there breaks it is tried again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from verl_mux.coordinator.bus.curve_keys import AGENT, files_of
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.launcher.cluster.host_agent import AgentSetup

_AGAIN_AFTER_S, _END_S = 5.0, 15.0


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Holds no secret: it stands in a command line. `command`: starts `host_agent` on the host; `keys`: the folder of the
    coordinator's keys, on this machine; `folder`: for the agent's log."""

    command: list[str]
    coordinator: str
    folder: str
    keys: str | None = None


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=AgentSpec)
    enough = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: enough.set())
    keys = files_of(Path(spec.keys), AGENT) if spec.keys else {}
    given = msgspec.json.encode(AgentSetup(coordinator=spec.coordinator, keys=keys, folder=spec.folder)) + b"\n"
    # The mark of this process is no mark of what it starts on the host.
    environment = {name: value for name, value in os.environ.items() if name != UID_VARIABLE}
    while not enough.is_set():
        with subprocess.Popen(spec.command, stdin=subprocess.PIPE, env=environment) as process:
            assert process.stdin is not None
            try:
                process.stdin.write(given)
                process.stdin.flush()
                while process.poll() is None and not enough.wait(0.5):
                    pass
                process.stdin.close()
                process.wait(_END_S)
            except (OSError, subprocess.TimeoutExpired):
                process.kill()
        if not enough.is_set():
            print(f"verl-mux: {' '.join(spec.command[:3])} ... ended; it is tried again", file=sys.stderr, flush=True)
            enough.wait(_AGAIN_AFTER_S)


if __name__ == "__main__":
    main()
