"""Starts jobs, follows them to their ends, and keeps the coordinator up meanwhile. One job's end is no other job's."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live

from verl_mux.launcher.cores import Account
from verl_mux.launcher.live_view import LiveView
from verl_mux.launcher.run_processes import JobProcess, RunCoordinator

_TICK_S = 1.0
# Reading it costs about 0.2 s of CPU.
_RSS_EVERY = 30


class Watch:
    """`failed`: what became of each job that did not end well. `refused`: those of them that did not take their keys."""

    def __init__(
        self, coordinator: RunCoordinator, jobs: list[JobProcess], resume: bool, started_at: float, account: Account
    ) -> None:
        self._coordinator, self._jobs, self._resume = coordinator, jobs, resume
        self._view = LiveView([job.name for job in jobs])
        self._started_at = started_at
        self._account = account
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._untold: list[JobProcess] = []
        self._again: list[JobProcess] = []  # ended, and to be started again as soon as the coordinator knows that
        self.failed: dict[str, str] = {}
        self.refused: set[str] = set()
        self.snapshot: dict[str, Any] = {}
        self.interrupted = False
        self._guests_told: set[str] = set()
        self.peak_rss = 0
        self._rss = 0

    def take_up(self) -> None:
        """Jobs that an earlier launcher started. When resuming, those of them that failed are started again."""
        for job in self._jobs:
            done = job.is_done()
            if not job.take_up():
                continue
            if job.returncode is None:
                print(f"job {job.name} runs (pid {job.pid}, log: {job.log_path})", file=sys.stderr)
            if job.returncode is None or done or not self._resume:
                self._begun.add(job.name)
            else:
                job.sweep()
                job.restarts = 0

    def interrupt(self, *_: object) -> None:
        """A signal's handler: the watching ends soon."""
        if not self.interrupted:
            self.interrupted = True
            os.write(sys.stderr.fileno(), b"stopping all jobs\n")

    def until_all_ended(self) -> None:
        """Or until `interrupt`."""
        console = Console(stderr=True)
        live = Live(console=console, auto_refresh=False, transient=True)
        with live if console.is_terminal else contextlib.nullcontext():
            tick = 0
            while True:
                self._observe(tick)
                elapsed = time.time() - self._started_at
                if console.is_terminal:
                    live.update(self._view.render(elapsed, self._rss), refresh=True)
                else:
                    for line in self._view.plain_lines(elapsed):
                        print(line, file=sys.stderr, flush=True)
                if (self.all_ended and not self._guests()) or self._interrupted_within(_TICK_S):
                    return
                tick += 1

    def _guests(self) -> bool:
        """Whether jobs that others submitted to the run's own coordinator are still there: they would lose it."""
        if not self._coordinator.own:
            return False
        known, own = self.snapshot.get("jobs", {}), {job.name for job in self._jobs}
        left = {name for name, job in known.items() if name not in own and not job["filler"] and job["state"] != "ended"}
        for name in sorted(left - self._guests_told):
            print(
                f"waiting for {name}, which was submitted to this run's coordinator; Ctrl-C ends both",
                file=sys.stderr,
                flush=True,
            )
        self._guests_told |= left
        return bool(left)

    def _interrupted_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.interrupted and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        return self.interrupted

    @property
    def begun(self) -> bool:
        """Whether any job was started or taken up."""
        return bool(self._begun)

    @property
    def all_ended(self) -> bool:
        return len(self._ended) == len(self._jobs)

    def _observe(self, tick: int) -> None:
        self._coordinator.keep_up()
        for job in self._jobs:
            if job.name in self._begun - self._ended and job not in self._again and job.returncode is not None:
                self._on_exit(job)
        self._untold = [job for job in self._untold if not self._coordinator.report_end(job)]
        self._start_again()
        self._start_ready()
        self.snapshot = self._coordinator.snapshot() or self.snapshot
        self._view.update(self.snapshot)
        if self._account.due:
            self._account.look(_processes(self._jobs, self._coordinator))
        if tick % _RSS_EVERY == 0:
            self._rss = _resident(self._jobs, self._coordinator)
            self.peak_rss = max(self.peak_rss, self._rss)

    def _start_ready(self) -> None:
        """Start every job whose `after` have all ended well, and give those up that wait for one that failed."""
        for job in self._jobs:
            if job.name in self._begun | self._ended:
                continue
            if lost := [name for name in job.spec.after if name in self.failed]:
                self._ended.add(job.name)
                self._say_failed(job, f"was not started: it comes after {lost[0]}, which failed")
            elif self._ended.issuperset(job.spec.after):
                self._start(job, job.start)

    def _start_again(self) -> None:
        """A start has a mark of its own, and the message to the coordinator about its end names the mark."""
        for job in [job for job in self._again if job not in self._untold]:
            self._again.remove(job)
            self._start(job, job.start_again)

    def _start(self, job: JobProcess, start: Callable[[], None]) -> None:
        self._begun.add(job.name)
        try:
            start()
        except OSError as error:
            self._ended.add(job.name)
            self._untold.append(job)
            self._say_failed(job, f"could not be started: {error}")

    def _on_exit(self, job: JobProcess) -> None:
        job.sweep()
        self._untold.append(job)
        if job.left_to_move:
            self._again.append(job)
            print(f"job {job.name} saved and left, as its coordinator asked; it is started again", file=sys.stderr, flush=True)
            return
        # Keys that were taken once are not refused later: it then ended so for want of something else, as of the coordinator.
        refused = job.returncode == 2 and job.restarts == job.moves == 0
        if job.returncode != 0 and not refused and job.restarts < job.spec.restarts:
            self._again.append(job)
            how_often = f"{job.restarts + 1} of {job.spec.restarts}"
            text = f"{job.how_it_ended()}; it is started again from its newest checkpoint ({how_often})"
            print(f"job {job.name} {text}", file=sys.stderr, flush=True)
            return
        self._ended.add(job.name)
        if refused:
            self.refused.add(job.name)
        if job.returncode != 0:
            self._say_failed(job, f"{job.how_it_ended()} (log: {job.log_path})")

    def _say_failed(self, job: JobProcess, text: str) -> None:
        self.failed[job.name] = text
        print(f"job {job.name} {text}", file=sys.stderr, flush=True)


def _resident(jobs: list[JobProcess], coordinator: RunCoordinator) -> int:
    """Resident bytes of all jobs, the coordinator and this process; a page shared by n processes counts 1/n in each (Linux's
    Pss)."""
    pids = {process.pid for process in _processes(jobs, coordinator)}
    return sum(_proportional_bytes(pid) for pid in pids)


def _processes(jobs: list[JobProcess], coordinator: RunCoordinator) -> list[psutil.Process]:
    """Of the run: the jobs', the coordinator's, and this one."""
    theirs = [*coordinator.processes(), *(process for job in jobs for process in job.processes())]
    return list({process.pid: process for process in (psutil.Process(), *theirs)}.values())


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
