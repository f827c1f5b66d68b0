"""`python -m verl_mux.launcher.cluster.keeper`: on a host, keeps a job's part of its Ray cluster while its stdin is open.

Reads one message a line from stdin, answers on stdout; what it starts writes to stderr. When it is told to, or its stdin ends
because whoever started it is no more or cannot be reached, it ends every process on this host that carries the job's mark.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import psutil

from verl_mux.coordinator.bus.curve_keys import KEYS_VARIABLE
from verl_mux.coordinator.bus.members import UID_VARIABLE, end, family_of, is_alive
from verl_mux.coordinator.bus.messages import Member
from verl_mux.launcher.cluster import messages as m
from verl_mux.launcher.cluster.addresses import interface_of, own_address
from verl_mux.launcher.cluster.ports import Block

_SWEEP_S = 20.0
_RAY_TRIES = 3


class Keeper:
    """`run` until the end. `uid` is the mark that its children carry; it does not carry it itself."""

    def __init__(self) -> None:
        # Lines of stdin, None at its end; the driver's exit code.
        self._inbox: queue.SimpleQueue[bytes | int | None] = queue.SimpleQueue()
        self._setup: m.Setup | None = None
        self._address = ""
        self._block = Block()
        self._driver: subprocess.Popen | None = None
        self._starting: subprocess.Popen | None = None
        self._closed = False
        self._private = tempfile.mkdtemp(prefix="verl_mux_keys_")  # for this user alone
        self._keep_logs = True

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        try:
            while (item := self._inbox.get()) is not None:
                if isinstance(item, int):
                    self._answer(m.Driven(code=item))
                    continue
                message = m.to_keeper(item)
                if isinstance(message, m.End):
                    self._keep_logs = message.keep_logs
                    break
                if (reply := self._do(message)) is not None:
                    self._answer(reply)
        finally:
            left = self._sweep()
            self._clean_up()
            self._answer(m.Swept(left=left))

    def _read(self) -> None:
        # By the descriptor: a thread that waits in sys.stdin would be in the way at the interpreter's end.
        with open(os.dup(sys.stdin.fileno()), "rb", buffering=0) as stdin:
            begun = b""
            while piece := stdin.read(1 << 16):
                *lines, begun = (begun + piece).split(b"\n")
                for line in lines:
                    self._inbox.put(line)
        self._closed = True
        if self._starting is not None and self._starting.poll() is None:
            self._starting.kill()
        self._inbox.put(None)

    def _answer(self, message: m.FromKeeper) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more; stdin says so as well
            os.write(sys.stdout.fileno(), m.encode(message))

    def _do(self, message: m.ToKeeper) -> m.FromKeeper | None:
        if isinstance(message, m.Setup):
            return self._set_up(message)
        if isinstance(message, m.Hold):
            return m.Held(taken=self._block.hold(message.block))
        if isinstance(message, m.StartRay):
            return self._start_ray(message)
        if isinstance(message, m.Drive):
            self._drive(message)
        if isinstance(message, m.Interrupt) and self._driver is not None:
            with contextlib.suppress(ProcessLookupError):
                self._driver.send_signal(signal.SIGINT)
        return None

    def _set_up(self, setup: m.Setup) -> m.FromKeeper:
        self._setup = setup
        try:
            self._address = setup.address or own_address(setup.towards)
            os.makedirs(setup.folder, exist_ok=True)
            for name, text in setup.keys.items():
                (Path(self._private) / name).touch(0o600)
                (Path(self._private) / name).write_text(text)
        except OSError as error:
            return m.Failed(reason=f"{setup.folder}: {error.strerror or error}")
        return m.Ready(address=self._address)

    def _start_ray(self, message: m.StartRay) -> m.FromKeeper:
        """Ray gives its own helpers 15 s to come up, which they miss where many start at once; so it has several tries."""
        failure = ""
        for left in reversed(range(_RAY_TRIES)):
            failure = next(filter(None, (self._start_one(*command, message.timeout_s) for command in message.commands)), "")
            if not failure or self._closed:
                return m.Started()
            self._sweep()
            if left:
                print(f"ray on {socket.gethostname()}: {failure}; once more", file=sys.stderr, flush=True)
        return m.Failed(reason=failure)

    def _start_one(self, command: list[str], more: dict[str, str], timeout_s: float) -> str | None:
        """None, or why not."""
        try:
            self._starting = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, env={**self._environment(), **more}
            )
            code = 0 if self._closed else self._starting.wait(timeout_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"ray start: {error}"
        return f"ray start ended with exit code {code}" if code else None

    def _drive(self, message: m.Drive) -> None:
        assert self._setup is not None
        try:
            self._driver = subprocess.Popen(
                message.command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, cwd=self._setup.folder,
                env={**self._environment(), **message.environment}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            print(f"verl-mux: cannot start the driver: {error}", file=sys.stderr, flush=True)
            self._inbox.put(127)
            return
        driver = self._driver
        threading.Thread(target=lambda: self._inbox.put(driver.wait()), daemon=True).start()

    def _environment(self) -> dict[str, str]:
        """Of all that is started here. What a variable of the job says comes before what is right for most."""
        assert self._setup is not None
        given = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", UID_VARIABLE)}
        secrets = {UID_VARIABLE: self._setup.uid, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._setup.ray_token}
        if self._setup.keys:
            secrets[KEYS_VARIABLE] = self._private
        # gloo otherwise takes the interface of whatever address the host's name stands for, 127.0.1.1 on some.
        interface = {"GLOO_SOCKET_IFNAME": name} if (name := interface_of(self._address)) else {}
        return {**interface, **given, **self._setup.environment, **secrets}

    def _sweep(self) -> list[int]:
        """Until nothing that carries the mark is left, nor what such a process started. Returns those that would not end."""
        if self._setup is None:
            return []
        deadline = time.monotonic() + _SWEEP_S
        left: list[Member] = []
        while left := [member for member in {*left, *family_of(self._setup.uid)} if is_alive(member)]:
            if time.monotonic() > deadline:
                return [member.pid for member in left]
            processes = []
            for member in left:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(member.pid)
                    end(process)
                    processes.append(process)
            mine = [p for p in processes if self._driver is None or p.pid != self._driver.pid]
            psutil.wait_procs(mine, timeout=1.0)
        return []

    def _clean_up(self) -> None:
        self._block.release()
        shutil.rmtree(self._private, ignore_errors=True)
        folder = self._setup.ray_folder if self._setup else ""
        if not self._keep_logs:
            shutil.rmtree(folder, ignore_errors=True)
        elif os.path.isdir(folder):
            print(f"Ray's own logs of this job are on {socket.gethostname()} in {folder}", file=sys.stderr, flush=True)


def main() -> None:
    # It ends with its stdin, not with a terminal. A handler and not SIG_IGN, which its children would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        Keeper().run()
    except msgspec.DecodeError as error:
        print(f"verl-mux: a keeper is spoken to by verl-mux run: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
