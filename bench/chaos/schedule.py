"""Carries one schedule out: starts its processes, does to them what was drawn, and starts what died again, as people do.

Runs in the bench's process, called by chaos_bench.py; starts, stops and kills processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

from bench.chaos import ledger
from bench.chaos.faults import LOST_FILES, Fault, draw
from bench.chaos.ledger import Ledger, Line
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.errors import Failure
from verl_mux.launcher.run_processes import free_port

_HERE = "127.0.0.1"
_TICK_S = 0.02
_NUM_JOBS = 4
# How long after the last fault everybody may take to finish a step.
_QUIET_S = 30.0
_START_S = 120.0


def run_schedule(folder: Path, seed: int, seconds: float, planted: str = "") -> list[Line]:
    """What all its processes and this one saw, in order of time. `planted`: a fault that must be noticed."""
    jobs = [f"job{number}" for number in range(_NUM_JOBS)]
    with contextlib.closing(Schedule(folder, seed, planted)) as schedule:
        schedule.run(jobs, draw(seed, seconds, jobs), seconds)
    return ledger.read(folder / "ledger")


class Schedule:
    """made -> `run` -> `close`, which kills every process that is left."""

    def __init__(self, folder: Path, seed: int, planted: str) -> None:
        folder.mkdir(parents=True)
        self._folder, self._seed, self._planted = folder, seed, planted
        self._ledger = Ledger(folder / "ledger" / "runner.jsonl", "runner")
        self._port = free_port(_HERE)
        self._coordinator: subprocess.Popen | None = None
        self._start_at, self._die_at, self._is_up = 0.0, "", False
        self._jobs: dict[str, subprocess.Popen] = {}
        self._proxies: dict[str, tuple[subprocess.Popen, int]] = {}
        self._stopped: list[tuple[float, Fault, subprocess.Popen]] = []

    def run(self, jobs: list[str], faults: list[Fault], seconds: float) -> None:
        self._tend()
        for job in jobs:
            self._start_job(job)
        self._wait_for_first_steps(jobs)
        begun, left = time.monotonic(), list(faults)
        while time.monotonic() - begun < seconds:
            while left and left[0].at <= time.monotonic() - begun:
                self._do(left.pop(0))
            self._tend()
            time.sleep(_TICK_S)
        self._end()

    def _wait_for_first_steps(self, jobs: list[str]) -> None:
        """Start-up is not measured: on a busy machine it takes long."""
        deadline = time.monotonic() + _START_S
        while not all((self._folder / f"{job}.step").exists() for job in jobs):
            self._tend()
            if time.monotonic() > deadline:
                raise Failure(f"not every job of the schedule in {self._folder} did a step within {_START_S:g} s")
            time.sleep(_TICK_S)

    def _end(self) -> None:
        """Everybody finishes the step that it is in, or waits for ever."""
        self._die_at = ""
        deadline = time.monotonic() + _QUIET_S
        while self._stopped:
            self._tend()
        (self._folder / "enough").touch()
        while self._jobs and time.monotonic() < deadline:
            self._tend()
            time.sleep(_TICK_S)
        for job in self._jobs:
            self._ledger.write("waits for ever", text=job)

    # --- faults ---

    def _do(self, fault: Fault) -> None:
        process = self._process_of(fault)
        if fault.kind == "newcomer":
            self._say(fault)
            self._start_job(fault.job)
            return
        if process is None or process.poll() is not None or any(process is stopped for _, _, stopped in self._stopped):
            return
        self._say(fault)
        if fault.kind in ("coordinator stopped", "job stopped", "job cut off"):
            self._stopped.append((time.monotonic() + fault.seconds, fault, process))
            process.send_signal(signal.SIGSTOP)
        elif fault.kind == "job killed":
            process.kill()
        else:
            self._die_at = fault.die_at
            self._kill_coordinator(fault)

    def _process_of(self, fault: Fault) -> subprocess.Popen | None:
        if fault.kind == "job cut off":
            return self._proxies[fault.job][0] if fault.job in self._proxies else None
        return self._jobs.get(fault.job) if fault.job else self._coordinator

    def _kill_coordinator(self, fault: Fault) -> None:
        """The next one has this fault's point to die at; it is started some time later."""
        assert self._coordinator is not None
        self._coordinator.kill()
        self._coordinator.wait()
        self._start_at = time.monotonic() + fault.seconds
        for path in self._folder.glob(LOST_FILES.get(fault.kind, "none")):
            path.unlink()

    def _say(self, fault: Fault) -> None:
        self._ledger.write(fault.kind, text=fault.job or fault.die_at)

    # --- what has to be seen to all the time ---

    def _tend(self) -> None:
        for entry in [entry for entry in self._stopped if entry[0] <= time.monotonic() or entry[2].poll() is not None]:
            self._stopped.remove(entry)
            with contextlib.suppress(ProcessLookupError):
                entry[2].send_signal(signal.SIGCONT)
            self._ledger.write(f"{entry[1].kind} no more", text=entry[1].job)
        self._tend_coordinator()
        for job, process in list(self._jobs.items()):
            if (code := process.poll()) is not None:
                del self._jobs[job]
                self._ledger.write("ended", text=job, pid=process.pid, step=code)
                if code != 0:
                    self._start_job(job)

    def _note_up(self) -> None:
        """A coordinator that died at its first message listened too, so this looks at dead ones as well."""
        if self._coordinator is not None and not self._is_up and (self._folder / f"up.{self._coordinator.pid}").exists():
            self._is_up = True
            self._ledger.write("coordinator up")

    def _tend_coordinator(self) -> None:
        self._note_up()
        if self._coordinator is not None and self._coordinator.poll() is None:
            return
        if self._is_up:
            self._is_up = False
            self._ledger.write("coordinator down")
        if time.monotonic() >= self._start_at:
            self._coordinator = self._start("coordinator", str(self._port), self._planted, self._die_at)
            self._die_at = ""
            self._ledger.write("coordinator started")

    # --- processes ---

    def _start_job(self, job: str) -> None:
        if job not in self._proxies:
            port = free_port(_HERE)
            command = [sys.executable, "-m", "bench.chaos.proxy", str(port), str(self._port)]
            self._proxies[job] = (subprocess.Popen(command), port)
        address = f"tcp://{_HERE}:{self._proxies[job][1]}"
        self._jobs[job] = self._start("driver", job, address, str(self._seed), self._planted)

    def _start(self, module: str, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", f"bench.chaos.{module}", str(self._folder), *arguments]
        with (self._folder / f"{module}.log").open("ab") as log:
            environment = {**os.environ, UID_VARIABLE: uuid4().hex}
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def close(self) -> None:
        processes = [self._coordinator, *self._jobs.values(), *(process for process, _ in self._proxies.values())]
        for process in (process for process in processes if process is not None):
            process.kill()
            process.wait()
