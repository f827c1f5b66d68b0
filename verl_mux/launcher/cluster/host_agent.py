"""`python -m verl_mux.launcher.cluster.host_agent`: on a host, keeps `verl-mux agent` up while its stdin is open.

Reads one AgentSetup, a JSON object in one line, from stdin. An agent that ends is started again; when stdin ends, because whoever
started this is done, is no more or cannot be reached, the agent ends too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from verl_mux.coordinator.bus.curve_keys import KEYS_VARIABLE
from verl_mux.coordinator.bus.members import UID_VARIABLE

_AGAIN_AFTER_S, _END_S = 1.0, 10.0


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Holds secrets, so it comes by stdin. `keys`: contents of the agent's key files, by name; `folder`: for its log."""

    coordinator: str
    keys: dict[str, str]
    folder: str


class HostAgent:
    """`run` in one thread, until `end` in another."""

    def __init__(self) -> None:
        self._enough = threading.Event()
        self._agent: subprocess.Popen | None = None
        self._starting = threading.Lock()  # not while it is being ended

    def run(self, given: AgentSetup) -> None:
        with tempfile.TemporaryDirectory(prefix="verl_mux_keys_") as private:  # for this user alone
            for name, text in given.keys.items():
                (Path(private) / name).touch(mode=0o600)
                (Path(private) / name).write_text(text)
            # It belongs to no job, whatever started it.
            environment = {name: value for name, value in os.environ.items() if name != UID_VARIABLE}
            environment.update({KEYS_VARIABLE: private} if given.keys else {})
            command = [sys.executable, "-m", "verl_mux", "agent", "--coordinator", given.coordinator, "--log-dir", given.folder]
            while self._start(command, environment):
                assert self._agent is not None
                code = self._agent.wait()
                if not self._enough.is_set():
                    print(f"verl-mux: the agent ended with exit code {code}; it is started again", file=sys.stderr, flush=True)
                    self._enough.wait(_AGAIN_AFTER_S)

    def _start(self, command: list[str], environment: dict[str, str]) -> bool:
        with self._starting:
            if not self._enough.is_set():
                self._agent = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
            return not self._enough.is_set()

    def end(self) -> None:
        with self._starting:
            self._enough.set()
        if self._agent is not None:
            self._agent.terminate()
            try:
                self._agent.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._agent.kill()


def main() -> None:
    # It ends with its stdin, not with a terminal. A handler and not SIG_IGN, which its children would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    # By the descriptor: a thread that waits in sys.stdin would be in the way at the interpreter's end.
    stdin = open(os.dup(sys.stdin.fileno()), "rb")  # noqa: SIM115  (open to the end)
    try:
        given = msgspec.json.decode(stdin.readline(), type=AgentSetup)
    except msgspec.DecodeError as error:
        print(f"verl-mux: this is spoken to by verl-mux run: {error}", file=sys.stderr)
        sys.exit(2)
    agent = HostAgent()

    def end_with_stdin() -> None:
        stdin.read()
        agent.end()

    threading.Thread(target=end_with_stdin, daemon=True).start()
    agent.run(given)


if __name__ == "__main__":
    main()
