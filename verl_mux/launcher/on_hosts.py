"""`python -m verl_mux.launcher.on_hosts SPEC MODULE ARGUMENTS...`: a job's process on the launcher's machine, for nodes on hosts.

Starts a Ray cluster of the job's own there and MODULE, verl's driver, on the head; its exit code is the driver's. Started by
`verl-mux run`, which also starts each host's agent through it, without Ray. Speaks to host_end.py on each host over the stdin
and stdout of whatever starts a command there (ssh, srun, kubectl, ...), so no port has to be open for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.coordinator.bus.curve_keys import files_of
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.errors import Failure, UserError
from verl_mux.launcher.host_parts import OnHosts, uid_on_hosts
from verl_mux.launcher.host_setup import Part, Setup

# An answer takes the way there too: a login, or a job step that waits for a free slot; and `ray start` a minute or two.
_ANSWER_S, _END_S = 600.0, 30.0
# Ctrl-C of the launcher is followed by SIGTERM after five seconds.
_INTERRUPTED_S = 4.0
_AGAIN_AFTER_S = 5.0


class _Host:
    """One host's end. What it says goes to `news` as (host, dict), and (host, None) when it is lost."""

    def __init__(self, part: Part, news: queue.SimpleQueue) -> None:
        self.part, self._news = part, news
        # The job's mark belongs to its processes on its hosts; this one only leads there.
        environment = {name: value for name, value in os.environ.items() if name != UID_VARIABLE}
        try:
            self._process = subprocess.Popen(part.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        except OSError as error:
            raise Failure(f"host {part.host}: cannot run {part.command[0]!r}: {error.strerror}") from None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # what a login prints
                self._news.put((self, json.loads(line)))
        self._news.put((self, None))

    def send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # lost; the reader says so
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End what runs there, if it has not ended, and the way there."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            print(f"verl-mux: host {self.part.host}: what is left of the job there was not ended", file=sys.stderr, flush=True)
            self._process.kill()

    def how_it_ended(self) -> str:
        return f"{' '.join(self.part.command[:2])} ... ended with exit code {self._process.wait(_END_S)} before it answered"


class Run:
    """`run` once."""

    def __init__(self, spec: OnHosts, command: list[str], stopped: queue.SimpleQueue) -> None:
        self._spec, self._command, self._news = spec, command, stopped
        self._hosts: list[_Host] = []
        self._token, self._ray_folder = secrets.token_hex(32), f"/tmp/verl_mux_ray_{secrets.token_hex(4)}"

    def run(self) -> int:
        """The command's exit code. Raises Failure: it could not be started, or a host was lost."""
        code = 1
        try:
            head = self._start()
            code = self._drive(head)
        finally:
            for host in self._hosts:
                host.send({"end": code != 0})
            for host in self._hosts:
                host.close()
        return code

    def _start(self) -> str | None:
        """Ray on all hosts: on the first, then on the others. Returns the address of its head."""
        spec, head = self._spec, None
        addresses: dict[str, str] = {}
        keys = files_of(Path(spec.keys), spec.role) if spec.keys else {}
        environment = {name: os.environ[name] for name in spec.forward if name in os.environ}
        uid = uid_on_hosts(os.environ[UID_VARIABLE]) if not spec.again else ""
        for these in (spec.parts[:1], spec.parts[1:]):
            for part in these:
                self._hosts.append(_Host(part, self._news))
                setup = Setup(
                    uid=uid, ray_token=self._token, environment=environment, keys=keys, folder=spec.folder, ray=spec.ray,
                    ray_folder=self._ray_folder, towards=spec.towards, part=part, head=head, again=spec.again,
                )  # fmt: skip
                self._hosts[-1].send(setup)
            for _ in these:
                host, answer = self._answer()
                address = answer["address"].partition(":")[0]
                if address in addresses:
                    names = f"{addresses[address]} and {host.part.host}"
                    raise Failure(f"hosts {names} are one machine ({address}): give all its nodes one host, and gpu_ids")
                addresses[address] = host.part.host
                head = head or answer["address"]
        if self._spec.parts[0].raylets:
            names = ", ".join(f"{host} ({address})" for address, host in addresses.items())
            print(f"hosts: {names}; Ray's head: {head}", flush=True)
        return head if self._spec.parts[0].raylets else None

    def _answer(self) -> tuple[_Host, dict[str, Any]]:
        try:
            news = self._news.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise Failure(f"a host does not answer: {', '.join(host.part.host for host in self._hosts)}") from None
        if isinstance(news, int):
            raise SystemExit(128 + news)
        host, answer = news
        if answer is None:
            raise Failure(f"host {host.part.host}: {host.how_it_ended()}")
        if "failed" in answer:
            raise Failure(f"host {host.part.host}: {answer['failed']}")
        return host, answer

    def _drive(self, head: str | None) -> int:
        """Until the command has ended, by itself or because of a signal to this process."""
        command = [self._spec.parts[0].python, "-m", *self._command]
        environment = {}
        if head:  # what the run file says of a Ray instance of the job's own does not hold for a cluster that is there
            command += [f"++ray_kwargs.ray_init.address='{head}'"]
            command += [f"++ray_kwargs.ray_init.{key}=null" for key in ("num_cpus", "num_gpus", "object_store_memory")]
            environment = {"RAY_ADDRESS": head}
        self._hosts[0].send({"drive": command, "environment": environment})
        news = self._news.get()
        if isinstance(news, int):
            if news == signal.SIGINT:  # whatever code the driver then ends with, this is why
                self._hosts[0].send({"interrupt": True})
                with contextlib.suppress(queue.Empty):
                    self._news.get(timeout=_INTERRUPTED_S)
            return 128 + news
        host, said = news
        if said is None:
            raise Failure(f"host {host.part.host} was lost")
        return said["code"]


def main() -> None:
    spec, command = msgspec.json.decode(sys.argv[1], type=OnHosts), sys.argv[2:]
    signals: list[int] = []
    news: queue.SimpleQueue = queue.SimpleQueue()

    def heard(number: int, _: object) -> None:
        signals.append(number)
        news.put(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, heard)
    while True:
        try:
            code = Run(spec, command, news).run()
        except (Failure, UserError) as error:
            print(f"verl-mux: {error}", file=sys.stderr, flush=True)
            code = 1
        if not spec.again or signals:
            sys.exit(code if code >= 0 else 128 - code)
        print(f"verl-mux: {spec.parts[0].host}: ended with exit code {code}; it is started again", file=sys.stderr, flush=True)
        news = queue.SimpleQueue()
        time.sleep(_AGAIN_AFTER_S if code else 1.0)


if __name__ == "__main__":
    main()
