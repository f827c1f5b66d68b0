"""A job on several hosts, from beginning to end: ports, Ray, verl's driver, and nothing left behind."""

from __future__ import annotations

import contextlib
import queue
import secrets
import signal
import sys
from pathlib import Path

from verl_mux.coordinator.bus.curve_keys import JOB, files_of
from verl_mux.errors import Failure
from verl_mux.launcher.cluster import layout, ports
from verl_mux.launcher.cluster import messages as m
from verl_mux.launcher.cluster.connection import Connection, Lost
from verl_mux.launcher.cluster.layout import ClusterSpec, Part

_RAY_S, _END_S = 120.0, 30.0
# Ctrl-C of the launcher is followed by SIGTERM after five seconds.
_INTERRUPTED_S = 4.0


class Cluster:
    """`run` once.

    Args:
        command: verl's driver, without the interpreter: MODULE ARGUMENTS...
        environment: of the job, for all hosts.
    """

    def __init__(self, spec: ClusterSpec, uid: str, command: list[str], environment: dict[str, str]) -> None:
        self._spec, self._uid, self._command, self._environment = spec, uid, command, environment
        self._news: queue.SimpleQueue[m.Driven | Lost | int] = queue.SimpleQueue()
        self._hosts: list[Connection] = []
        self._token = secrets.token_hex(32)
        self._ray_folder = f"/tmp/verl_mux_ray_{secrets.token_hex(4)}"

    def run(self) -> int:
        """The driver's exit code. Raises Failure: it could not be started, or a host was lost."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._news.put(number))
        code = 1
        try:
            head_address = self._start()
            self._drive(head_address)
            code = self._wait()
        finally:
            self._end(keep_logs=code != 0)
        return code

    def _start(self) -> str:
        """Ray on all hosts. Returns the address of its head."""
        for part in self._spec.parts:
            self._hosts.append(Connection(part, self._news))
        addresses = self._set_up()
        block = self._agree_on_ports()
        head_address = f"{addresses[0]}:{ports.of_services(block, 0, head=True)['port']}"
        names = ", ".join(f"{host.part.host} ({address})" for host, address in zip(self._hosts, addresses, strict=True))
        print(f"hosts: {names}; Ray's head: {head_address}, its ports: {ports.range_of(block)}", flush=True)
        places = list(zip(self._hosts, addresses, strict=True))
        for these, head in ((places[:1], None), (places[1:], head_address)):
            for host, address in these:
                commands = layout.ray_commands(host.part, self._spec.ray, block, address, head, self._ray_folder)
                host.send(m.StartRay(commands=commands, timeout_s=_RAY_S))
            for host, _ in these:
                host.answer(_RAY_S * ports.MOST_RAYLETS)
        return head_address

    def _set_up(self) -> list[str]:
        keys = files_of(Path(self._spec.keys), JOB) if self._spec.keys else {}
        for host in self._hosts:
            host.send(self._setup(host.part, keys))
        answers = [host.answer() for host in self._hosts]
        addresses = [answer.address for answer in answers if isinstance(answer, m.Ready)]
        if twice := [address for address in addresses if addresses.count(address) > 1]:
            names = [host.part.host for host, address in zip(self._hosts, addresses, strict=True) if address == twice[0]]
            raise Failure(f"hosts {' and '.join(names)} are one machine ({twice[0]}): give all its nodes one host, and gpu_ids")
        return addresses

    def _setup(self, part: Part, keys: dict[str, str]) -> m.Setup:
        return m.Setup(
            uid=self._uid, ray_token=self._token, environment=self._environment, keys=keys, folder=self._spec.folder,
            ray_folder=self._ray_folder, towards=self._spec.towards, address=part.address,
        )  # fmt: skip

    def _agree_on_ports(self) -> int:
        """A block that is free on every host, and held there from now on."""
        stood: list[str] = []
        for block in ports.blocks(self._uid):
            for host in self._hosts:
                host.send(m.Hold(block=block))
            answers = [(host.part.host, host.answer()) for host in self._hosts]
            stood = [f"{name}: port {held.taken}" for name, held in answers if isinstance(held, m.Held) and held.taken]
            if not stood:
                return block
        raise Failure(
            f"no block of {ports.SIZE} ports from {ports.FIRST} to {ports.LAST} is free on all hosts; {stood[0]} is taken"
        )

    def _drive(self, head_address: str) -> None:
        # Whatever the run file says of a Ray instance of the job's own does not hold for a cluster that is there.
        where = [f"++ray_kwargs.ray_init.address='{head_address}'"]
        where += [f"++ray_kwargs.ray_init.{key}=null" for key in ("num_cpus", "num_gpus", "object_store_memory")]
        command = [self._spec.parts[0].python, "-m", *self._command, *where]
        self._hosts[0].send(m.Drive(command=command, environment={"RAY_ADDRESS": head_address}))

    def _wait(self) -> int:
        """Until the driver has ended, by itself or because it was told to."""
        news = self._news.get()
        if isinstance(news, Lost):
            raise Failure(f"host {news.host} was lost")
        if isinstance(news, m.Driven):
            return news.code
        if news == signal.SIGINT:  # whatever code the driver then ends with, this is why
            self._hosts[0].send(m.Interrupt())
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=_INTERRUPTED_S)
        return 128 + news

    def _end(self, keep_logs: bool) -> None:
        """Everywhere at once; where the keeper is lost, by another that only does this."""
        for host in self._hosts:
            host.send(m.End(keep_logs=keep_logs))
        lost = [host.part for host in self._hosts if not _is_swept(host)]
        for host in self._hosts:
            host.close()
        for part in lost:
            again = Connection(part, self._news)
            again.send(self._setup(part, {}))
            again.send(m.End(keep_logs=keep_logs))
            if not _is_swept(again):
                print(f"verl-mux: host {part.host}: what is left of the job there was not ended", file=sys.stderr, flush=True)
            again.close()


def _is_swept(host: Connection) -> bool:
    """Whether its keeper said that nothing is left, or what."""
    try:
        while not isinstance(answer := host.answer(_END_S), m.Swept):
            continue
    except Failure:
        return False
    if answer.left:
        print(f"verl-mux: host {host.part.host}: processes {answer.left} do not end", file=sys.stderr, flush=True)
    return True
