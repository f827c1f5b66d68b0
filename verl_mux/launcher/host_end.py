"""`python -m verl_mux.launcher.host_end`: on a host, keeps a job's part of its Ray cluster, or an agent, while its stdin is open.

Started by on_hosts.py through ssh or the like. Reads one JSON object a line: Setup, then `drive`, `interrupt`, `end`; answers
on stdout with `address` or `failed`, then the driver's `code`; what it starts writes to stderr. At `end`, or when its stdin
ends because its starter is gone or cannot be reached, it ends every process on this host that carries the job's mark.
"""

from __future__ import annotations

import contextlib
import json
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
from typing import Any

import msgspec
import psutil

from verl_mux.coordinator.bus.curve_keys import KEYS_VARIABLE
from verl_mux.coordinator.bus.members import UID_VARIABLE, end, family_of, is_alive
from verl_mux.coordinator.bus.messages import Member
from verl_mux.errors import Failure
from verl_mux.launcher.host_setup import BLOCK_SIZE, FIRST_PORT, LAST_PORT, Setup, blocks, head_address, ray_commands

_RAY_S, _SWEEP_S = 120.0, 20.0
# Ray gives its own helpers 15 s to come up, which they miss where many start at once; so it has several tries.
_RAY_TRIES = 3


class HostEnd:
    """`run` until the end. It does not carry the job's mark itself."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # lines; None at the end of stdin; the driver's exit code
        self._private = tempfile.mkdtemp(prefix="verl_mux_keys_")  # for this user alone
        self._block: socket.socket | None = None
        self._started: subprocess.Popen | None = None
        self._driver: subprocess.Popen | None = None
        self._closed, self._keep_logs = False, True

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        first = self._inbox.get()
        if first is None:
            return
        self._setup = msgspec.json.decode(first, type=Setup)
        try:
            try:
                self._answer({"address": self._begin()})
            except (Failure, OSError) as error:
                self._answer({"failed": str(error)})
            asked: dict[str, Any] = {}
            while (item := self._inbox.get()) is not None:
                if isinstance(item, int):
                    if not self._setup.again or self._closed:
                        self._answer({"code": item})
                        continue
                    print(f"verl-mux: {asked['drive'][2:4]} ended with exit code {item}; it is started again", file=sys.stderr)
                    time.sleep(1.0)
                    item = json.dumps(asked)
                asked = json.loads(item)
                if "drive" in asked:
                    self._drive(asked["drive"], asked["environment"])
                elif "interrupt" in asked and self._driver is not None:
                    with contextlib.suppress(ProcessLookupError):
                        self._driver.send_signal(signal.SIGINT)
                elif "end" in asked:
                    self._keep_logs = asked["end"]
                    break
        finally:
            self._sweep()
            self._clean_up()

    def _read(self) -> None:
        # By the descriptor: a thread that waits in sys.stdin would be in the way at the interpreter's end.
        with open(os.dup(sys.stdin.fileno()), "rb") as stdin:
            for line in stdin:
                self._inbox.put(line)
        self._closed = True
        if self._started is not None and self._started.poll() is None:
            self._started.kill()
        self._inbox.put(None)

    def _answer(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nothing reads it any more; stdin says so as well
            os.write(sys.stdout.fileno(), msgspec.json.encode(message) + b"\n")

    def _begin(self) -> str:
        """Write the keys, start Ray. Returns this host's address; of a head with its port."""
        setup = self._setup
        self._address = setup.part.address or own_address(setup.towards)
        os.makedirs(setup.folder, exist_ok=True)
        for name, text in setup.keys.items():
            (Path(self._private) / name).touch(0o600)
            (Path(self._private) / name).write_text(text)
        if not setup.part.raylets:
            return self._address
        block = self._take_block()
        for left in reversed(range(_RAY_TRIES)):
            failure = next(filter(None, (self._start(*command) for command in ray_commands(setup, block, self._address))), None)
            if failure is None or self._closed:
                break
            self._sweep()
            if not left:
                raise Failure(failure)
            print(f"ray on {socket.gethostname()}: {failure}; once more", file=sys.stderr, flush=True)
        return head_address(block, self._address)

    def _take_block(self) -> int:
        """A free block of ports for the job's Ray here. It is the job's for as long as this process listens on its first port:
        the kernel lets only one do that, and takes it back when the process dies."""
        for block in blocks(self._setup.uid):
            first = FIRST_PORT + block * BLOCK_SIZE
            lock = socket.socket()
            try:
                lock.bind(("0.0.0.0", first))
                lock.listen(1)
                if all(_is_free(port) for port in range(first + 1, first + BLOCK_SIZE)):
                    self._block = lock
                    return block
            except OSError:
                pass
            lock.close()
        raise Failure(f"no block of {BLOCK_SIZE} ports from {FIRST_PORT} to {LAST_PORT} is free")

    def _start(self, command: list[str], more: dict[str, str]) -> str | None:
        """None, or why not."""
        try:
            self._started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, env={**self._environment(), **more}
            )
            code = 0 if self._closed else self._started.wait(_RAY_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"ray start: {error}"
        return f"ray start ended with exit code {code}" if code else None

    def _drive(self, command: list[str], environment: dict[str, str]) -> None:
        driver = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, cwd=self._setup.folder,
            env={**self._environment(), **environment}, start_new_session=True,
        )  # fmt: skip
        self._driver = driver
        threading.Thread(target=lambda: self._inbox.put(driver.wait()), daemon=True).start()

    def _environment(self) -> dict[str, str]:
        """Of all that is started here. A variable of the job comes before what is right for most."""
        setup = self._setup
        own = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", UID_VARIABLE)}
        added = {UID_VARIABLE: setup.uid} if setup.uid else {}
        if setup.part.raylets:
            added |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": setup.ray_token}
        if setup.keys:
            added[KEYS_VARIABLE] = self._private
        # gloo otherwise takes the interface of whatever address the host's name stands for, 127.0.1.1 on some.
        interface = {"GLOO_SOCKET_IFNAME": name} if (name := interface_of(self._address)) else {}
        return {**interface, **own, **setup.environment, **added}

    def _sweep(self) -> None:
        """Until nothing that carries the mark is left, nor what such a process started."""
        if self._driver is not None and not self._setup.uid and self._driver.poll() is None:
            self._driver.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(_SWEEP_S / 2)
            self._driver.kill()
        deadline, left = time.monotonic() + _SWEEP_S, list[Member]()
        while self._setup.uid and (left := [member for member in {*left, *family_of(self._setup.uid)} if is_alive(member)]):
            if time.monotonic() > deadline:
                pids = [member.pid for member in left]
                print(f"verl-mux: {socket.gethostname()}: processes {pids} do not end", file=sys.stderr, flush=True)
                return
            processes = []
            for member in left:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(member.pid)
                    end(process)
                    processes.append(process)
            psutil.wait_procs([p for p in processes if self._driver is None or p.pid != self._driver.pid], timeout=1.0)

    def _clean_up(self) -> None:
        if self._block is not None:
            self._block.close()
        shutil.rmtree(self._private, ignore_errors=True)
        folder = self._setup.ray_folder
        if not self._keep_logs:
            shutil.rmtree(folder, ignore_errors=True)
        elif os.path.isdir(folder):
            print(f"Ray's own logs of this job are on {socket.gethostname()} in {folder}", file=sys.stderr, flush=True)


def own_address(towards: str) -> str:
    """The address by which this host reaches another. Nothing is sent. Raises OSError: no way there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The network interface that has the address."""
    addresses = psutil.net_if_addrs()
    return next((name for name, entries in addresses.items() if any(entry.address == address for entry in entries)), None)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def main() -> None:
    # It ends with its stdin, not with a terminal. A handler and not SIG_IGN, which its children would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    HostEnd().run()


if __name__ == "__main__":
    main()
