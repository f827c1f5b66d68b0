"""One verl job as a process tree of its own: own session, own Ray instance, own log, a mark by which all of it can be found."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import psutil

from verl_mux.coordinator.members import UID_VARIABLE, carriers, end
from verl_mux.launcher.run_file import JobSpec, RunFile, fill

logger = logging.getLogger(__name__)

_SWEEP_S = 10.0

_PR_SET_PDEATHSIG = 1


class JobProcess:
    """made -> start() -> running -> ended by itself, or stop(). `stop` ends every process that carries the job's mark."""

    def __init__(self, name: str, spec: JobSpec, run: RunFile, address: str | None) -> None:
        self.name, self.spec = name, spec
        self.uid = uuid4().hex
        self.directory = Path(run.dir).absolute() / name
        self.log_path = self.directory / "job.log"
        self._command = _command(name, spec, run, address)
        self._environment = {**os.environ, **run.environment, **spec.environment, UID_VARIABLE: self.uid}
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the job; its output goes to its log."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self._environment,
                start_new_session=True, cwd=self.directory, preexec_fn=_die_with_parent,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, and before it was started."""
        return self._process.poll() if self._process else None

    def processes(self) -> list[psutil.Process]:
        """Every living process of this job, the ones whose parent has died too."""
        found = {}
        for member in carriers(self.uid):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[member.pid] = psutil.Process(member.pid)
        return list(found.values())

    def stop(self, patience: float = 10.0) -> None:
        """Ask the driver to end (SIGINT, then SIGTERM), then end what is left. Nothing happens to a job not started."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if self._process and self.returncode is None:
                self._process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience / 2)
        self.sweep()

    def sweep(self) -> None:
        """End every process that the job left behind, and return when none is left."""
        deadline = time.monotonic() + _SWEEP_S
        while left := self.processes():
            if time.monotonic() > deadline:
                logger.error("job %s: processes %s do not end, even by SIGKILL", self.name, sorted(p.pid for p in left))
                return
            for process in left:
                with contextlib.suppress(psutil.Error):
                    end(process)
            # A process that is ending has no environment any more, so it is waited for, not looked for. The driver's exit code
            # belongs to Popen; psutil would take it away.
            psutil.wait_procs([p for p in left if p.pid != self._process.pid], timeout=1.0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)

    def last_error(self) -> str:
        """The line of its log that says most about why it ended."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        for line in reversed(lines[-400:]):
            if line.startswith("verl-mux:") or ("Error" in line and not line.startswith(" ")):
                return line.strip()
        return lines[-1].strip() if lines else "it wrote nothing"


def _die_with_parent() -> None:
    """Linux ends the job's driver when the process that started it dies, however it dies; Ray's processes then follow."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _command(name: str, spec: JobSpec, run: RunFile, address: str | None) -> list[str]:
    directory = Path(run.dir).absolute() / name
    ours = [
        f"mux.job={_quoted(name)}",
        f"mux.coordinator={_quoted(address) if address else 'null'}",
        *_nodes(spec),
        f"mux.seed={spec.seed}",
        f"mux.profile.dir={_quoted(directory / 'events')}",
        f"trainer.default_local_dir={_quoted(directory / 'checkpoints')}",
        f"trainer.experiment_name={_quoted(name)}",
        f"hydra.run.dir={_quoted(directory / 'hydra')}",
    ]
    overrides = fill([*run.overrides, *spec.overrides], run, name, spec.seed)
    return [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", run.config_name, *ours, *overrides]


def _nodes(spec: JobSpec) -> list[str]:
    if spec.nodes == "auto":
        return ["mux.nodes=auto", *([f"mux.slo={spec.slo}"] if spec.slo is not None else [])]
    return [f"mux.nodes.{side}=[{','.join(map(_quoted, names))}]" for side, names in spec.nodes.items()]


def _quoted(value: str | Path) -> str:
    """As a string of Hydra's override grammar: without quotes `1e5` is a number and a comma begins a sweep."""
    return "'" + str(value).replace("'", "\\'") + "'"
