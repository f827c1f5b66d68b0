"""Starts jobs, follows them to their ends, and keeps the coordinator up meanwhile. One job's end is no other job's.

Runs in `verl-mux run`; called by command.py; starts processes, and draws nodes and jobs on the terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Container, Iterator
from typing import Any

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl_mux.coordinator import status_view
from verl_mux.launcher.cores import Account
from verl_mux.launcher.run_processes import JobProcess, RunCoordinator

_TICK_S = 1.0
# Reading it costs about 0.2 s of CPU.
_RSS_EVERY = 30
# The longest time for which a log says nothing.
SILENCE_S = 8.0


class Watch:
    """`failed`: what became of each job that did not end well. `refused`: those of them that did not take their keys."""

    def __init__(
        self, coordinator: RunCoordinator, jobs: list[JobProcess], resume: bool, started_at: float, account: Account
    ) -> None:
        self._coordinator, self._jobs, self._resume = coordinator, jobs, resume
        self._started_at, self._account = started_at, account
        self._progress = Progress([job.name for job in jobs])
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._unreported: list[JobProcess] = []  # ended, and the coordinator does not know it yet
        self._again: list[JobProcess] = []  # ended, and to be started again as soon as the coordinator knows that
        self._guests: set[str] = set()
        self.failed: dict[str, str] = {}
        self.refused: set[str] = set()
        self.snapshot: dict[str, Any] = {}
        self.interrupted = False
        self.peak_rss = self._rss = 0

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
            for tick in range(sys.maxsize):
                self._observe(tick)
                elapsed = time.time() - self._started_at
                if console.is_terminal:
                    live.update(self._progress.tables(self.snapshot, elapsed, self._rss), refresh=True)
                else:
                    for line in self._progress.lines(self.snapshot, elapsed, self._ended):
                        _say(line)
                if self.all_ended and not self._has_guests():
                    return
                until = time.monotonic() + _TICK_S
                while not self.interrupted and (left := until - time.monotonic()) > 0:
                    time.sleep(min(left, 0.1))
                if self.interrupted:
                    return

    def _has_guests(self) -> bool:
        """Whether jobs that were submitted to the run's own coordinator are still there: they would lose it."""
        known, own = self.snapshot.get("jobs", {}) if self._coordinator.own else {}, {job.name for job in self._jobs}
        left = {name for name, job in known.items() if name not in own and not job["filler"] and job["state"] != "ended"}
        for name in sorted(left - self._guests):
            _say(f"waiting for {name}, which was submitted to this run's coordinator; Ctrl-C ends both")
        self._guests |= left
        return bool(left)

    @property
    def all_ended(self) -> bool:
        return len(self._ended) == len(self._jobs)

    def _observe(self, tick: int) -> None:
        self._coordinator.keep_up()
        for job in self._jobs:
            if job.name in self._begun - self._ended and job not in self._again and job.returncode is not None:
                self._on_exit(job)
        self._unreported = [job for job in self._unreported if not self._coordinator.report_end(job)]
        # A start has a mark of its own, and the message to the coordinator about the end before it names the mark.
        for job in [job for job in self._again if job not in self._unreported]:
            self._again.remove(job)
            self._start(job, job.start_again)
        self._start_ready()
        self.snapshot = self._coordinator.snapshot() or self.snapshot
        if self._account.due:
            self._account.look(self._processes())
        if tick % _RSS_EVERY == 0:
            self._rss = sum(_proportional_bytes(process) for process in self._processes())
            self.peak_rss = max(self.peak_rss, self._rss)

    def _processes(self) -> list[psutil.Process]:
        """Of the run: this one, the coordinator's and the jobs'."""
        found = [psutil.Process(), *self._coordinator.processes(), *(it for job in self._jobs for it in job.processes())]
        return list({process.pid: process for process in found}.values())

    def _start_ready(self) -> None:
        """Start every job whose `after` have all ended well, and give those up that wait for one that failed."""
        for job in self._jobs:
            if job.name in self._begun | self._ended:
                continue
            if lost := [name for name in job.spec.after if name in self.failed]:
                self._fail(job, f"was not started: it comes after {lost[0]}, which failed")
            elif self._ended.issuperset(job.spec.after):
                self._start(job, job.start)

    def _start(self, job: JobProcess, start: Callable[[], None]) -> None:
        self._begun.add(job.name)
        try:
            start()
        except OSError as error:
            self._unreported.append(job)
            self._fail(job, f"could not be started: {error}")

    def _on_exit(self, job: JobProcess) -> None:
        job.sweep()
        self._unreported.append(job)
        # A job whose keys were taken once ended with this code for want of something else, as of the coordinator.
        refused = job.returncode == 2 and job.restarts == job.moves == 0
        if job.left_to_move:
            self._again.append(job)
            _say(f"job {job.name} saved and left, as its coordinator asked; it is started again")
        elif job.returncode != 0 and not refused and job.restarts < job.spec.restarts:
            self._again.append(job)
            how_often = f"{job.restarts + 1} of {job.spec.restarts}"
            _say(f"job {job.name} {job.how_it_ended()}; it is started again from its newest checkpoint ({how_often})")
        elif job.returncode != 0:
            self.refused |= {job.name} if refused else set()
            self._fail(job, f"{job.how_it_ended()} (log: {job.log_path})")
        else:
            self._ended.add(job.name)

    def _fail(self, job: JobProcess, text: str) -> None:
        self._ended.add(job.name)
        self.failed[job.name] = text
        _say(f"job {job.name} {text}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _proportional_bytes(process: psutil.Process) -> int:
    """Resident bytes; a page shared by n processes counts 1/n in each (Linux's Pss)."""
    with contextlib.suppress(psutil.Error, OSError):
        return process.memory_full_info().pss
    return 0


class Progress:
    """What a run says while it goes on. `lines` is for a log, `tables` for a terminal; both take the coordinator's snapshot and
    the seconds since the run began."""

    def __init__(self, jobs: list[str]) -> None:
        self._jobs = jobs
        self._said: dict[str, str] = {}  # the last line of each job, without its seconds
        self._first: dict[str, tuple[int, float]] = {}  # the steps that were done when a job was first seen with one, and when
        self._last_at = 0.0

    def lines(self, snapshot: dict[str, Any], elapsed_s: float, ended: Container[str] = ()) -> Iterator[str]:
        """A line for every job whose stage, step or reward changed; without any for SILENCE_S, one for all jobs."""
        known = snapshot.get("jobs", {})
        names = [name for name in dict.fromkeys([*self._jobs, *known]) if name not in ended]
        now = {name: self._line(name, known.get(name), snapshot, elapsed_s) for name in names}
        for name, (line, more) in now.items():
            if line != self._said.get(name):
                self._said[name], self._last_at = line, elapsed_s
                yield f"[{elapsed_s:6.1f} s] {line}{more}"
        if now and elapsed_s - self._last_at >= SILENCE_S:
            self._last_at = elapsed_s
            yield f"[{elapsed_s:6.1f} s] " + "; ".join(line + more for line, more in now.values())

    def _line(self, name: str, job: dict[str, Any] | None, snapshot: dict[str, Any], elapsed_s: float) -> tuple[str, str]:
        """What is said of a job, and what of it changes all the time."""
        if job is None or (job["state"] != "live" and not job["steps_done"]):
            return f"{name}: {'importing' if job is None else 'starting Ray'}", ""
        held = ((node, h["phase"]) for node, state in nodes_of(snapshot).items() for h in state["holders"] if h["job"] == name)
        phase = next((f"{phase} on {node}" for node, phase in held), None)
        if not job["steps_done"] and (stage := status_view.stage(job)):
            return f"{name}: {stage}", f" ({job['note_s']:.0f} s)"
        doing = phase or (f"waits for {', '.join(job['waiting'])}" if job["waiting"] else job["note"] or job["state"])
        reward = (job.get("metrics") or {}).get("reward")
        line = f"{name}: step {_of(job)}" + (f", reward {reward:.3f}" if reward is not None else "")
        return line, f" ({doing}{self._left(name, job, elapsed_s)})"

    def _left(self, name: str, job: dict[str, Any], elapsed_s: float) -> str:
        """An estimate of the time that a job's steps will still take, from those done since it was first seen with one."""
        done, total = job["steps_done"], job["steps"]
        if not done or not total or done >= total:
            return ""
        steps, at = self._first.setdefault(name, (done, elapsed_s))
        if done == steps:
            return ""
        seconds = (total - done) * (elapsed_s - at) / (done - steps)
        return f", about {seconds:.0f} s left" if seconds < 100 else f", about {seconds / 60:.0f} min left"

    def tables(self, snapshot: dict[str, Any], elapsed_s: float, rss_bytes: int) -> Group:
        head = Text(f"{elapsed_s:6.0f} s   host memory {rss_bytes / 2**30:.1f} GiB", style="bold")
        bars = Table.grid(padding=(0, 1))
        for name in self._jobs:
            job = snapshot.get("jobs", {}).get(name)
            line, more = self._line(name, job, snapshot, elapsed_s)
            done, total = (job["steps_done"], job["steps"] or 1) if job else (0, 1)
            bars.add_row(ProgressBar(total, done, width=30, pulse=not done), line + more)
        return Group(head, bars, *([status_view.tables(snapshot)] if snapshot else []))


def _of(job: dict[str, Any]) -> str:
    return f"{job['steps_done']} of {job['steps']}" if job["steps"] else str(job["steps_done"])


def nodes_of(snapshot: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {node: state for pool in snapshot.get("pools", {}).values() for node, state in pool["nodes"].items()}
