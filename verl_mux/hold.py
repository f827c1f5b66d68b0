"""`verl-mux hold --pool train -- CMD...`: run CMD on nodes that no job uses, and end it when a job wants one of them.

Runs in the process that a person or `verl-mux run` starts, on those nodes. Called by cli.py. Uses the coordinator's client;
starts and ends processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import psutil
import typer

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus.client import ADDRESS_VARIABLE, JOB_VARIABLE, Lease, LocalMux, connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.bus.messages import SIDES, Member
from verl_mux.coordinator.commands import DEFAULT_ADDRESS, Address, Keys
from verl_mux.errors import UserError

NODES, HOSTS, GPU_IDS, TOKEN = (f"VERL_MUX_LEASE_{what}" for what in ("NODES", "HOSTS", "GPU_IDS", "TOKEN"))
# Part of the coordinator's grace: for the check that no process is left, and for the messages.
_MARGIN_S = 0.2
_LOOK_S = 0.02
_KILL_AGAIN_S = 0.2
# Added to the command's niceness: a job's driver, reward and data workers also run while its nodes are free, on the same cores.
_NICENESS = 10


def hold(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="The command; it must be able to resume.")],
    pool: Annotated[str, typer.Option(help="A pool or a node of the coordinator.")],
    nodes: Annotated[int, typer.Option(help="Nodes of it that the command needs.")] = 1,
    name: Annotated[str | None, typer.Option(help="Its name in the status; default: hold-HOST-PID.")] = None,
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    grace: Annotated[float, typer.Option(help="Seconds from SIGTERM to SIGKILL.")] = 0.5,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the coordinator.")] = 30.0,
) -> None:
    """Run a command on nodes of a pool while no job uses or wants them. Its exit code is passed on."""
    if grace < 0:
        raise UserError(f"--grace is {grace:g}; 0 s or more is needed")
    if not timeout > 0:
        raise UserError(f"--timeout is {timeout:g}; a time above 0 s is needed")
    name = name or f"hold-{socket.gethostname()}-{os.getpid()}"
    uid = _carried_uid(name)
    side = pool if pool in SIDES else SIDES[-1]  # only what the status shows the nodes to be used for
    key_folder = None if keys is None else str(keys)
    mux = connect(coordinator, name, {side: [pool]}, uid=uid, keys=key_folder, timeout=timeout, filler=True)
    try:
        most = (mux.filler_grace or 0.0) - _MARGIN_S
        if grace > most:
            raise UserError(
                f"--grace is {grace:g} s; the coordinator ends a command after {mux.filler_grace or 0:g} s, so at"
                f" most {max(most, 0):g} is allowed"
            )
        code = _Holder(mux, uid, side, reachable(mux, pool, nodes), nodes).run(command, grace)
    finally:
        mux.close()
    raise typer.Exit(code)


def _carried_uid(name: str) -> str:
    """The mark by which the coordinator finds this process, in its first environment: without one it executes itself again."""
    uid = os.environ.get(UID_VARIABLE, "")
    if uid and (":" not in uid or uid.rpartition(":")[0] == name):
        return uid
    marked = {**os.environ, UID_VARIABLE: f"{name}:{uuid.uuid4().hex}"}
    os.execve(sys.executable, [sys.executable, "-m", "verl_mux", *sys.argv[1:]], marked)


class _Interrupted(Exception):
    pass


class _Holder:
    """Waits for a lease, runs the command under it, leaves, and waits again."""

    def __init__(self, mux: LocalMux, uid: str, side: str, nodes: list[str], num_nodes: int) -> None:
        self._mux, self._uid, self._side, self._nodes, self._num_nodes = mux, uid, side, nodes, num_nodes
        self._stopped_by: int | None = None
        self._waits = False

    def run(self, command: list[str], grace: float) -> int:
        """The exit code for this process. Raises LeaseLost when the coordinator has ended this filler."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        code = None
        with contextlib.suppress(_Interrupted):
            while code is None and self._stopped_by is None:
                code = self._hold(self._wait(), command, grace)
        return 128 + self._stopped_by if self._stopped_by is not None else code or 0

    def _stop(self, number: int, _: object) -> None:
        """Interrupts nothing but a wait."""
        self._stopped_by = number
        if self._waits:
            self._waits = False
            raise _Interrupted

    def _wait(self) -> Lease:
        self._waits = True
        try:
            if self._stopped_by is not None:
                raise _Interrupted
            return self._mux.acquire(self._side, nodes=self._nodes, num_nodes=self._num_nodes)
        finally:
            self._waits = False

    def _hold(self, lease: Lease, command: list[str], grace: float) -> int | None:
        """The command's exit code; None if it had to leave before it ended."""
        process = HeldProcess(command, environment(self._mux, lease), self._uid, cpus(self._mux, lease))
        _say(f"holds {', '.join(lease.nodes)}")
        code = None
        try:
            if not lease.wanted.is_set():
                process.start()
                while (code := process.code()) is None and self._stopped_by is None and not lease.wanted.wait(_LOOK_S):
                    pass
        finally:
            process.end(grace)
            self._mux.release(lease)
        why = f"exit code {code}" if code is not None else "interrupted" if self._stopped_by is not None else "a job wants it"
        _say(f"gave {', '.join(lease.nodes)} back: {why}")
        return code


def _say(text: str) -> None:
    print(f"verl-mux hold: {text}", file=sys.stderr, flush=True)


class HeldProcess:
    """A command with everything that it starts: `start` -> runs -> `end`, which returns when no process of it is left."""

    def __init__(self, command: list[str], environment: Mapping[str, str], uid: str, cpus: list[int] | None) -> None:
        """`environment` is added to this process's. `uid`: the mark that all its processes carry. `cpus`: None: any."""
        self._command, self._environment = command, {**os.environ, **environment, UID_VARIABLE: uid}
        self._uid, self._cpus = uid, cpus
        self._process: subprocess.Popen | None = None
        self._known: set[Member] = set()

    def start(self) -> None:
        """Raises UserError for a command that cannot be run."""
        try:
            with _staying_on(self._cpus):
                self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
            niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, 19)
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PGRP, self._process.pid, niceness)
            # Where the kernel shares processor time among sessions (sched(7), autogroup), it looks at the session's own.
            with contextlib.suppress(OSError):
                Path(f"/proc/{self._process.pid}/autogroup").write_text(str(niceness))
        except OSError as error:
            raise UserError(f"{self._command[0]!r} cannot be run: {error.strerror}") from None

    def code(self) -> int | None:
        """As a shell gives it, 128 + the number of the signal that ended it; None while it runs."""
        code = self._process.poll() if self._process is not None else None
        return 128 - code if code is not None and code < 0 else code

    def end(self, grace: float) -> None:
        """SIGTERM to its process group; after `grace` seconds SIGKILL to every process that is left, of any group."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self._is_left() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        while self._is_left() or self._escaped():
            self._signal(signal.SIGKILL)
            for member in [member for member in self._known if members.is_alive(member)]:
                with contextlib.suppress(psutil.Error, OSError):
                    members.end(psutil.Process(member.pid))
            until = time.monotonic() + _KILL_AGAIN_S
            while self._is_left() and time.monotonic() < until:
                time.sleep(_LOOK_S)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _is_left(self) -> bool:
        """Any process of its group, or of those found before. A process that is ending has no environment left, but its group."""
        assert self._process is not None
        self._process.poll()
        self._known = {member for member in self._known if members.is_alive(member)}
        if not self._known:  # looking at all processes costs more
            self._known = {member for member in _group(self._process.pid) if members.is_alive(member)}
        return bool(self._known)

    def _escaped(self) -> bool:
        """Any process that carries the mark; reading all environments costs most."""
        self._known.update(members.carriers(self._uid))
        return bool(self._known)


def _group(leader: int) -> list[Member]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(pid) == leader:
                found.append(members.member_of(pid))
    return found


@contextlib.contextmanager
def _staying_on(cpus: list[int] | None) -> Iterator[None]:
    """Binds this thread for a moment, so that what it starts inherits the cores."""
    before = os.sched_getaffinity(0)
    if not cpus or not before.intersection(cpus):
        yield
        return
    os.sched_setaffinity(0, before.intersection(cpus))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# --- which nodes, and what the command knows of them ---


def reachable(mux: LocalMux, pool: str, num_nodes: int) -> list[str]:
    """The nodes on which the command can run: those of this machine, and those that name no host.

    Raises UserError where these are fewer than are to be held.
    """
    nodes = list(dict.fromkeys(node for names in mux.nodes.values() for node in names))
    hosts = {node: mux.place(node).host for node in nodes}
    found = [node for node, host in hosts.items() if host is None or _is_here(host)]
    if not 1 <= num_nodes <= len(found):
        places = ", ".join(f"{node} on {host}" if host else node for node, host in hosts.items())
        raise UserError(
            f"--nodes is {num_nodes}; {pool!r} has {len(found)} nodes on {socket.gethostname()} ({places}); 1 to all of these are"
            " allowed"
        )
    return found


def environment(mux: LocalMux, lease: Lease) -> dict[str, str]:
    """What the command finds in its environment. CUDA_VISIBLE_DEVICES only where all nodes are on one host and say their GPUs."""
    places = [mux.place(node) for node in lease.nodes]
    hosts, gpus = [place.host or "" for place in places], [place.gpu_ids for place in places]
    variables = {
        **{JOB_VARIABLE: mux.job, ADDRESS_VARIABLE: mux.address or "", TOKEN: str(lease.token)},
        **{NODES: ",".join(lease.nodes), HOSTS: ",".join(hosts)},
        GPU_IDS: ";".join(",".join(map(str, ids or [])) for ids in gpus),
    }
    known = [ids for ids in gpus if ids is not None]
    if len(known) == len(gpus) and len(set(hosts)) == 1:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(number) for ids in known for number in ids)
    return variables


def cpus(mux: LocalMux, lease: Lease) -> list[int] | None:
    """The cores of the nodes, where all of them name theirs."""
    named = [mux.place(node).cpus for node in lease.nodes]
    known = [ids for ids in named if ids is not None]
    return [number for ids in known for number in ids] if len(known) == len(named) else None


@functools.cache
def _is_here(host: str) -> bool:
    """By name, or because one of its addresses is this machine's."""
    here = {*members.names_of_this_host(), "127.0.0.1", "::1"}
    with contextlib.suppress(OSError):
        return host in here or any(address[0] in here for *_, address in socket.getaddrinfo(host, 0))
    return False
