"""`verl-mux run FILE.yaml`: coordinator and jobs, a live view, and a summary of what multiplexing brought."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from verl_mux.coordinator.command import metrics_of
from verl_mux.coordinator.server import Coordinator
from verl_mux.errors import Failure, UserError
from verl_mux.launcher import lanes, placements, run_file, summary, timeline
from verl_mux.launcher.job_process import JobProcess
from verl_mux.launcher.live_view import LiveView
from verl_mux.launcher.run_file import RunFile
from verl_mux.profiling.event_log import EventLog

_TICK_S = 1.0
# In every folder that a run made, so that a later one may replace it.
_MARK = ".verl_mux_run"
# Reading it costs about 0.2 s of CPU.
_RSS_EVERY = 30


def run(
    file: Annotated[Path, typer.Argument(help="The run file, e.g. examples/demo.yaml.")],
    directory: Annotated[Path | None, typer.Option("--dir", help="Write here instead of the file's `dir`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Start a coordinator and several verl jobs on this machine, and watch them. Ctrl-C stops all of them cleanly."""
    result = run_jobs(run_file.read(file, directory))
    print(json.dumps(result, indent=2)) if as_json else print_summary(result, Console())


def run_jobs(run: RunFile) -> dict:
    """Do the run and return its summary, which is also written to `<dir>/summary.json`.

    Raises:
        Failure: a job ended with an error; the message says which and where its log is.
        UserError: a job refused its configuration.
    """
    config, directory = run.coordinator_config(), Path(run.dir).absolute()
    _make_room(directory, run)
    _prepare(run)
    log = EventLog(directory / "coordinator" / "events", worker=0, role="coordinator", job="coordinator")
    coordinator = Coordinator(config, journal_path=directory / "coordinator" / "journal.sqlite", event_log=log)
    address = coordinator.start()
    (directory / "coordinator" / "address").write_text(address)
    jobs = [JobProcess(name, spec, run, address) for name, spec in run.jobs.items()]
    watch = _Watch(coordinator, jobs)
    interrupted = False
    try:
        with metrics_of(coordinator, config.metrics_port):
            watch.start_ready()
            watch.until_all_ended()
    except KeyboardInterrupt:
        interrupted = True
        print("stopping all jobs", file=sys.stderr, flush=True)
    finally:
        # A second Ctrl-C must not leave processes behind.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for job in jobs:
            job.stop()
        _keep_peaks(coordinator, directory)
        coordinator.stop()
        log.close()
        signal.signal(signal.SIGINT, before)
    result = _finish(run, directory, watch)
    if interrupted:
        raise typer.Exit(130)
    return result


class _Watch:
    """Watches jobs to their ends: live view, memory, exits."""

    def __init__(self, coordinator: Coordinator, jobs: list[JobProcess]) -> None:
        self._coordinator, self._jobs = coordinator, jobs
        self._view = LiveView([job.name for job in jobs])
        self._started = time.monotonic()
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self.failed: dict[str, str] = {}
        self.startup_s = 0.0
        self.peak_rss = 0
        self._rss = 0

    def until_all_ended(self) -> None:
        console = Console(stderr=True)
        with Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else _NoLive() as live:
            tick = 0
            while not self.ended_all:
                self._observe(tick)
                elapsed = time.monotonic() - self._started
                if console.is_terminal:
                    live.update(self._view.render(elapsed, self._rss), refresh=True)
                else:
                    for line in self._view.plain_lines(elapsed):
                        print(line, file=sys.stderr, flush=True)
                tick += 1
                time.sleep(_TICK_S)

    @property
    def ended_all(self) -> bool:
        return len(self._ended) == len(self._jobs)

    def start_ready(self) -> None:
        """Start every job whose `after` have all ended."""
        for job in self._jobs:
            if job.name not in self._begun and self._ended.issuperset(job.spec.after):
                self._begun.add(job.name)
                job.start()

    def _observe(self, tick: int) -> None:
        for job in self._jobs:
            if job.name not in self._ended and job.returncode is not None:
                self._on_exit(job)
        self.start_ready()
        snapshot = self._coordinator.snapshot()
        if not self.startup_s and snapshot["started"] and any(j["step"] > 0 for j in snapshot["jobs"].values()):
            self.startup_s = time.monotonic() - self._started
        self._view.update(snapshot)
        if tick % _RSS_EVERY == 0:
            self._rss = _resident(self._jobs)
            self.peak_rss = max(self.peak_rss, self._rss)

    def _on_exit(self, job: JobProcess) -> None:
        self._ended.add(job.name)
        job.sweep()
        self._coordinator.job_exited(job.name)
        if job.returncode == 2:
            raise UserError(f"job {job.name}: {job.last_error().removeprefix('verl-mux: ')}")
        if job.returncode != 0:
            self.failed[job.name] = f"exit code {job.returncode}: {job.last_error()} (log: {job.log_path})"
            print(f"job {job.name} ended with {self.failed[job.name]}", file=sys.stderr)


class _NoLive:
    def __enter__(self):
        return None

    def __exit__(self, *_error) -> None:
        return None


def _make_room(directory: Path, run: RunFile) -> None:
    """A run starts from an empty place: what an earlier run left under these names is replaced, anything else is not touched.

    Raises:
        UserError: a folder of that name is there, and no run made it.
    """
    folders = [directory / name for name in ("coordinator", *run.jobs)]
    for folder in folders:
        if folder.exists() and not (folder / _MARK).exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder} exists and was not made by verl-mux run; choose another `dir` or name, or move it away")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / _MARK).touch()


def _prepare(run: RunFile) -> None:
    """Run the prepare commands side by side; all must succeed."""
    started: list[tuple[list[str], subprocess.Popen]] = []
    try:
        for command in run.prepare:
            filled = run_file.fill(command, run)
            print(f"prepare: {' '.join([*command[:1], *filled[1:]])}", file=sys.stderr)
            try:
                started.append((command, subprocess.Popen(filled, stdout=sys.stderr)))
            except OSError as error:
                raise UserError(f"prepare: cannot run {filled[0]!r}: {error.strerror}") from None
        for command, process in started:
            if process.wait() != 0:
                raise Failure(f"prepare: {' '.join(command)} ended with exit code {process.returncode}")
    finally:
        for process in (p for _, p in started if p.poll() is None):
            process.kill()
            process.wait()


def _resident(jobs: list[JobProcess]) -> int:
    """Resident bytes of all jobs and of this process; a page shared by n processes counts 1/n in each (Linux's Pss)."""
    pids = [os.getpid(), *(process.pid for job in jobs for process in job.processes())]
    return sum(_proportional_bytes(pid) for pid in pids)


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _keep_peaks(coordinator: Coordinator, directory: Path) -> None:
    """Peak bytes of tagged device memory by node and schedule segment."""
    pools = coordinator.snapshot()["pools"].values()
    peaks = {node: state["peak_bytes_by_segment"] for pool in pools for node, state in pool["nodes"].items()}
    (directory / "peaks.json").write_text(json.dumps(peaks, indent=2) + "\n")


def _finish(run: RunFile, directory: Path, watch: _Watch) -> dict:
    names = list(run.jobs)
    config = run.coordinator_config()
    spans = timeline.read(directory, names)
    result = summary.summarise(spans, config, names, watch.peak_rss, watch.startup_s)
    if config.placement is not None:
        result["groups"] = placements.groups(placements.read(directory), spans)
    (directory / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    try:
        lanes.draw(spans, config, names, directory / "lanes.png")
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
    if watch.failed and watch.ended_all:
        raise Failure("; ".join(f"job {name}: {text}" for name, text in watch.failed.items()))
    print(f"summary: {directory / 'summary.json'}   picture: {directory / 'lanes.png'}", file=sys.stderr)
    return result


def print_summary(result: dict, console: Console) -> None:
    """The summary as a table that fits 80 columns."""
    console.print("seconds of a step, medians; alone: the other job waits; switch: sleep and wake")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("job", "steps", "reward", "alone", "mux", "rollout", "train", "sync", "switch", "waits"):
        table.add_column(column, justify="left" if column == "job" else "right", no_wrap=True)
    for name, job in result["jobs"].items():
        phase = job["phase_s"]
        figures = (
            *(job["period_alone_s"], job["period_mux_s"], phase["rollout"], phase["train"], phase["sync"]),
            *(phase["sleep"] + phase["wake"], phase["wait_rollout"] + phase["wait_train"]),
        )
        reward = f"{job['reward_first']:.2f}->{job['reward_last']:.2f}"
        table.add_row(name, str(job["steps"]), reward, *("-" if f is None else f"{f:.2f}" for f in figures))
    console.print(table)
    for group in result.get("groups", ()):
        both = f"predicted {group['predicted_period_s']:.2f} s, measured {group['measured_period_s']:.2f} s"
        console.print(f"group {group['group']} ({', '.join(group['jobs'])}): {both} ({group['difference']:+.1%})")
    for line in _overall(result["mux"]):
        console.print(line)


def _overall(mux: dict) -> list[str]:
    ratio, tokens = mux["throughput_ratio"], mux["token_throughput_ratio"]
    bubbles = ", ".join(f"{pool} {share:.0%}" for pool, share in mux["bubble"].items() if share is not None)
    gain = f"{ratio:.2f}x in steps, {tokens:.2f}x in tokens" if ratio and tokens else "not measured"
    memory = f"{mux['peak_rss_bytes'] / 2**30:.1f} GiB"
    return [
        f"interleaved over one after the other: {gain}",
        f"idle: {bubbles or 'not measured'}; host memory: {memory}; start-up: {mux['startup_s']:.0f} s",
    ]
