"""A run's coordinator: a process of its own, which goes on when the launcher dies and is started again when it dies itself."""

from __future__ import annotations

import errno
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from verl_mux.coordinator.bus import curve_keys as keys
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.link import ask
from verl_mux.coordinator.journal import make_empty
from verl_mux.errors import Failure, UserError
from verl_mux.launcher.processes.job_process import JobProcess
from verl_mux.launcher.processes.marked_process import MarkedProcess
from verl_mux.launcher.run_file import COORDINATOR, RunFile

_START_S, _ANSWER_S = 60.0, 2.0
# From one start to the next where starting does not help.
_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0
_PORTS_FROM = 30_000  # above those of jobs' Ray clusters
_LOOPBACK = "127.0.0.1"


class Asked:
    """A coordinator, as the launcher speaks to it."""

    address: str
    _keys: Path | None

    def snapshot(self, timeout: float = _ANSWER_S) -> dict[str, Any] | None:
        """What `verl-mux status` shows; None when it does not answer."""
        answer = self._ask(m.StatusRequest(), timeout)
        return answer.snapshot if isinstance(answer, m.Status) else None

    def tell_over(self, job: JobProcess) -> bool:
        """Say that the job's driver ended; its nodes are given on when no process of it is left. False when it is not heard."""
        return self._ask(m.JobOver(job=job.name, uid=job.job_uid), _ANSWER_S) is not None

    def _ask(self, message: m.Message, timeout: float) -> m.AnyMessage | None:
        return ask(self.address, message, timeout, keys.for_address(self.address, self._keys, keys.OPERATOR))


class CoordinatorElsewhere(Asked):
    """One that runs already: this launcher neither starts nor ends it."""

    def __init__(self, address: str, keys_folder: Path | None) -> None:
        self.address, self._keys = address, keys_folder

    def begin(self) -> None:
        """It was asked already."""

    def keep_up(self) -> None:
        """The process that started it does."""

    def stop(self) -> None:
        """It goes on."""

    def processes(self) -> list:
        return []


class CoordinatorProcess(Asked, MarkedProcess):
    """made -> `begin` -> `keep_up` now and then -> `stop`. It listens at the same address and on the same journal each time."""

    def __init__(self, run: RunFile) -> None:
        directory = run.directory / COORDINATOR
        self._address_path = directory / "address"
        self.address = _read(self._address_path) or f"tcp://{run.bind or _LOOPBACK}:{free_port(run.bind or _LOOPBACK)}"
        files = {"config": "config.yaml", "journal": "journal", "log-dir": "events"}
        options = [word for option, name in files.items() for word in (f"--{option}", str(directory / name))]
        self._keys = run.keys_folder()
        options += ["--keys", str(self._keys)] if self._keys else []
        command = [sys.executable, "-m", "verl_mux", "coordinator", "--bind", self.address, *options]
        super().__init__("the coordinator", directory, "coordinator.log", command, {})
        self._config, self._settings = run.coordinator_keys(), run.coordinator_config()
        self._started_at, self._retry_s, self._said = 0.0, _RETRY_S, ""

    def begin(self) -> None:
        """Find the one that an earlier launcher started, or start one.

        Raises:
            UserError, Failure: it does not start; the line says why.
        """
        if not (self.take_up() and self.returncode is None):
            if not self._address_path.exists():  # the first of this run, in a folder that was empty
                make_empty(self.directory / "journal", self._settings)
            if self._keys and not self._keys.exists():
                keys.make(self._keys)
            (self.directory / "config.yaml").write_text(yaml.safe_dump(self._config, sort_keys=False))
            self._address_path.write_text(self.address)
            self._start()
        try:
            self._wait_until_it_answers()
        except (UserError, Failure):
            self.stop()
            raise

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_S
        while self.snapshot(0.5) is None:
            if self.returncode is not None:
                kind = UserError if self.returncode == 2 else Failure
                raise kind(f"the coordinator did not start; it {self.how_it_ended()}")
            if time.monotonic() > deadline:
                raise Failure(f"the coordinator (pid {self.pid}) does not answer at {self.address} (log: {self.log_path})")

    def keep_up(self) -> None:
        """Start it again if it died. What keeps it from starting is said once, and tried again ever more seldom."""
        if self.returncode is None:
            return
        now = time.monotonic()
        if now - self._started_at > _LONGEST_RETRY_S:
            self._retry_s = _RETRY_S
        elif now - self._started_at < self._retry_s:
            return
        how = self.how_it_ended()
        if how != self._said:
            self._said = how
            print(f"the coordinator {how}; it is started again, jobs wait for it", file=sys.stderr, flush=True)
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
        self._start()

    def stop(self, patience: float = 10.0) -> None:
        """It has to close its journal and its event log, so it is asked to end and not interrupted twice."""
        self.ask_to_end(signal.SIGTERM, patience)
        self.sweep()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self.start()


AnyCoordinator = CoordinatorProcess | CoordinatorElsewhere


def _read(path: Path) -> str | None:
    return path.read_text().strip() if path.exists() else None


def free_port(host: str) -> int:
    """Below the range from which Linux takes ports for outgoing connections: one of those could have taken it when the
    coordinator comes back to it."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768
    ports = list(range(min(_PORTS_FROM, first - 1_000), first))
    random.shuffle(ports)
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise UserError(f"bind: {host} is no address of this machine") from None
                continue
            return port
    raise Failure(f"no free port between {ports[0]} and {first} for the coordinator")
