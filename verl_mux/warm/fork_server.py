"""`python -m verl_mux.warm.fork_server MODULE ARGUMENTS...`: import torch, transformers and the engine once; run MODULE, and each
worker that Ray starts for it on this host, as a fork of this process.

    fork server -- fork --> driver (python -m MODULE ARGUMENTS) --> ray.init(runtime_env: py_executable = fork_client.py)
         ^      -- fork --> worker
         '-- arguments, environment, stdio over a Unix socket -- fork_client.py <-- raylet, which starts it in the worker's place

The imports take about 13 s of processor time and 1 GB in each process; a fork takes milliseconds and shares the memory. What a
fork would not carry over must not exist in this process: a thread, a CUDA context, an event loop. `ray` is not imported either,
because it reads its settings from the environment when it is. Each job has its own fork server, because /proc shows the
environment that this process started with as that of its forks, and the job's mark is found there.

Runs on the host of the job's driver; started by launcher/run_processes.py, or by config/preflight.py in place of a driver that
was started by hand. It touches nothing of the job.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
from typing import Annotated, NamedTuple

import msgspec

from verl_mux import plugin
from verl_mux.coordinator.bus.members import end_with_parent
from verl_mux.errors import UserError
from verl_mux.platform.choose import cpu_part, cpu_platform_wanted
from verl_mux.warm import engine_processes
from verl_mux.warm.fork_client import space

# For training; what an engine's processes need is in its record (verl_mux/rollout/engine/record.py).
PRELOADED = [
    "transformers", "datasets", "tensordict", "torch.distributed.fsdp", "torch._dynamo",
    *(["mbridge"] if importlib.util.find_spec("mbridge") else []),  # verl's engines import it, and Megatron-Core with it
]  # fmt: skip
# With these, libraries that start threads when they are imported start none.
_NO_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_NUMBER = struct.Struct("!i")
_PATIENCE_S = 10.0  # for a client to send what it has begun


class Asked(msgspec.Struct, frozen=True):
    """What a client sends. `words`: the arguments of the interpreter."""

    words: Annotated[list[str], msgspec.Meta(min_length=1)]
    environment: dict[str, str]
    folder: str
    cores: Annotated[list[int], msgspec.Meta(min_length=1)]
    niceness: int


class Program(NamedTuple):
    """What a fork is to run. `stdio`: file descriptors 0, 1 and 2. `driver`: the job's driver, which ends with the server."""

    asked: Asked
    stdio: list[int]
    driver: bool = False


def main() -> None:
    words, environment = sys.argv[1:], dict(os.environ)
    try:
        preload()
    except UserError as error:
        print(f"verl-mux: {error}", file=sys.stderr)
        sys.exit(2)
    if obstacle := why_not_fork():
        print(f"verl_mux: every process of this job imports for itself, because {obstacle}", file=sys.stderr, flush=True)
        environment[engine_processes.VARIABLE] = ""  # the driver does not come back here
        os.execve(sys.executable, [sys.executable, "-m", *words], environment)
    name = f"verl_mux/{space()}/{os.getpid()}/{random.SystemRandom().getrandbits(64):x}"
    environment[engine_processes.VARIABLE] = name
    asked = Asked(["-m", *words], environment, os.getcwd(), sorted(os.sched_getaffinity(0)), os.nice(0))
    become(ForkServer(name).serve(Program(asked, [0, 1, 2], driver=True)))


def preload() -> None:
    """Import what a job's processes need, of the engine that this environment has. Raises UserError without verl-mux-cpu."""
    os.environ.update(_NO_THREADS)
    if cpu_platform_wanted():
        os.environ.update(cpu_part("preload_environment"))
    here = [record for name, record in plugin.ENGINES.items() if importlib.util.find_spec(name)]
    for module in (*(it for record in here for it in importlib.import_module(record).RECORD.preload), *PRELOADED):
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"verl_mux: {module} is not imported in advance: {error}", file=sys.stderr, flush=True)


def why_not_fork() -> str:
    """Empty where forks of this process work."""
    threads = len(os.listdir("/proc/self/task"))
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    devices = [path for path in opened if path.startswith(("/dev/nvidia", "/dev/kfd"))]
    if threads > 1:
        return f"what was imported started {threads - 1} threads"
    if devices:
        return f"what was imported opened {devices[0]}"
    return "what was imported includes ray" if "ray" in sys.modules else ""


class ForkServer:
    """made -> `serve` forks the driver and answers clients until the driver ends, and then ends this process as that ended."""

    def __init__(self, name: str) -> None:
        """`name`: of the socket, in Linux's abstract namespace: no file is left behind."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{name}")
        self._listener.listen(64)
        self._clients: dict[int, socket.socket] = {}  # by the pid of their fork
        self._driver = 0

    def serve(self, driver: Program) -> Program:
        """Returns in forks only: what the fork is to run."""
        ended, wake = os.pipe()
        os.set_blocking(ended, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()  # the collector of a fork does not write to the shared pages
        if not (pid := os.fork()):
            return self._forked(driver, [ended, wake])
        self._driver = pid
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(self._driver, number))
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        if program := self._accept():
                            selector.close()
                            return self._forked(program, [ended, wake])
                    else:
                        os.read(ended, 4096)
                self._reap()

    def _accept(self) -> Program | None:
        """Fork for one client. Returns in the fork only what it is to run."""
        client, _ = self._listener.accept()
        client.settimeout(_PATIENCE_S)
        try:
            program = receive(client)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            print(f"verl_mux: a client of the fork server was refused: {error}", file=sys.stderr, flush=True)
            client.close()
            return None
        if not (pid := os.fork()):
            client.close()
            return program
        for fd in program.stdio:
            os.close(fd)
        self._clients[pid] = client
        _answer(client, pid)
        return None

    def _reap(self) -> None:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._driver:
                end_as(code)
            if client := self._clients.pop(pid, None):
                _answer(client, code)
                client.close()

    def _forked(self, program: Program, pipe: list[int]) -> Program:
        signal.set_wakeup_fd(-1)
        self._listener.close()
        for client in self._clients.values():
            client.close()
        for fd in pipe:
            os.close(fd)
        return program


def _answer(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client is gone; Ray ends a worker that it does not want
        client.sendall(_NUMBER.pack(number))


def receive(client: socket.socket) -> Program:
    """What a client asks for.

    Raises:
        ValueError, msgspec.MsgspecError: it is another user's, or what it sent is not what clients send. OSError.
    """
    if (uid := engine_processes.user_of(client)) != os.getuid():
        raise ValueError(f"it is of user {uid}; allowed: {os.getuid()}")
    text, stdio, _, _ = socket.recv_fds(client, 1 << 16, 3)
    length = _NUMBER.unpack(text[: _NUMBER.size])[0] if len(text) >= _NUMBER.size else 0
    while len(text) < _NUMBER.size + length:
        if not (more := client.recv(1 << 16)):
            break
        text += more
    try:
        if len(stdio) != 3:
            raise ValueError(f"it sent {len(stdio)} file descriptors; allowed: 3")
        return Program(msgspec.json.decode(text[_NUMBER.size :], type=Asked), stdio)
    except (ValueError, msgspec.MsgspecError):
        for fd in stdio:
            os.close(fd)
        raise


def end_as(code: int) -> None:
    """End this process with the exit code, or by the signal, of another one."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def become(program: Program) -> None:
    """Run the program in this process, as a new interpreter would."""
    asked = program.asked
    for fd, given in enumerate(program.stdio):
        if fd != given:
            os.dup2(given, fd)
            os.close(given)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if program.driver:
        end_with_parent()
    engine_processes.take_over(asked.environment, asked.cores)
    os.nice(asked.niceness - os.nice(0))
    os.chdir(asked.folder)
    if not program.driver:
        os.setpgid(0, 0)  # a raylet kills the whole group of a worker that has ended, and this server is in its own
        engine_processes.make_ready()
    words = list(asked.words)
    while words[0] != "-m" and words[0].startswith("-"):
        words.pop(0)  # -u and its like: the output is not buffered
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = asked.folder
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
