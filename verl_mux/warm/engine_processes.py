"""An engine's processes as forks.

A worker has threads when it starts its engine, so it cannot be forked then. When it is born it forks a process that waits, as the
server of multiprocessing's start method `forkserver`, which the engine's processes are started by. They are then descendants of
their worker, as they are without a fork server. Runs in forks of fork_server.py and in engine servers; called by fork_server.py
and by each engine's folder: SGLang starts processes by functions that are wrapped here, vLLM by a context that is ours.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import multiprocessing
import os
import shlex
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_mux.coordinator.bus.members import end_with_parent

# Names the socket of the job's fork server, in the environment of the job's processes; empty: forks are not possible here.
VARIABLE = "VERL_MUX_FORK_SERVER"
_ADDRESSES = "\0verl_mux/"


def user_of(client: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket. Raises OSError."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


class _ForThisUser(socket.socket):
    """All processes of a host may connect to an abstract socket, and /proc/net/unix shows them its name."""

    def accept(self) -> tuple[socket.socket, Any]:
        client, address = super().accept()
        if user_of(client) == os.getuid():
            return client, address
        client.close()
        raise OSError(errno.ECONNABORTED, "of another user")  # for which the server of multiprocessing goes on


def make_ready() -> None:
    """Fork the process that waits. It ends when this one has ended."""
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"{_ADDRESSES}{os.getpid()}/engine/{os.urandom(8).hex()}"
        listener.bind(address)
        listener.listen()
        until, alive = os.pipe()
        if not (pid := os.fork()):
            os.close(alive)
            end_with_parent()  # the processes that it forks have the other end of `until` too
            vars(forkserver).update(socket=SimpleNamespace(socket=_ForThisUser, AF_UNIX=socket.AF_UNIX))
            forkserver.main(listener.detach(), until, [])
        os.close(until)
    vars(forkserver._forkserver).update(_forkserver_address=address, _forkserver_alive_fd=alive, _forkserver_pid=pid)


def is_ready() -> bool:
    """Whether this process's `forkserver` is the one of make_ready, not one that was started in the usual way."""
    return str(vars(forkserver._forkserver)["_forkserver_address"]).startswith(_ADDRESSES)


def start_as_forks(original: Callable, *arguments: Any, **keywords: Any) -> Any:
    """Around a function that starts processes, whose argument `run_...` is the function that runs in them: they are forks, with
    this process's environment and cores of now."""
    given = inspect.signature(original).bind(*arguments, **keywords)
    name = next(name for name in given.arguments if name.startswith("run_"))
    run = functools.partial(_run_with, dict(os.environ), sorted(os.sched_getaffinity(0)), given.arguments[name])
    given.arguments[name] = run
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        return original(*given.args, **given.kwargs)
    finally:
        multiprocessing.set_start_method("spawn", force=True)


def _run_with(environment: dict[str, str], cores: list[int], run: Callable, *arguments: Any, **keywords: Any) -> None:
    multiprocessing.set_start_method("spawn", force=True)
    take_over(environment, cores)
    run(*arguments, **keywords)


# Functions of an engine, by dotted name, that answer with a context of multiprocessing: those that give_forks took over here.
_asked_by: Sequence[str] = ()


def give_forks(asked_by: Sequence[str]) -> None:
    """From now on the processes of these functions' contexts are forks, with the environment and cores of their start; so are
    the processes that these start in turn."""
    global _asked_by
    _asked_by = asked_by
    for name in asked_by:
        module, _, function = name.rpartition(".")
        setattr(importlib.import_module(module), function, _Forks)


class _Fork(ForkServerProcess):
    def start(self) -> None:
        given = _asked_by, dict(os.environ), sorted(os.sched_getaffinity(0)), self._target  # type: ignore[has-type]
        self._target = functools.partial(_run_and_fork, *given)
        super().start()


class _Forks(ForkServerContext):
    Process = _Fork


def _run_and_fork(asked_by: Sequence[str], *given: Any, **keywords: Any) -> None:
    end_with_parent()  # a server may be killed, and Ray ends a dead actor's own children alone
    if not multiprocessing.current_process().daemon:  # a daemon has no children
        make_ready()
        give_forks(asked_by)
    _run_with(*given, **keywords)


def take_over(environment: dict[str, str], cores: list[int]) -> None:
    """Give this fork another environment, other cores, a number of threads that follows from them, and its own random numbers."""
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)
    if torch := sys.modules.get("torch"):  # what is imported later reads the environment itself
        threads = environment.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(threads) if threads.isdigit() and int(threads) else len(cores))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def worker_command() -> str:
    """What Ray is to start a worker of this job with, in place of the Python interpreter; empty: the interpreter."""
    name = os.environ.get(VARIABLE)
    return shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("fork_client.py")), name]) if name else ""
