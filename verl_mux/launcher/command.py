"""`verl-mux run FILE.yaml`: coordinator and jobs, a live view, and a summary of what multiplexing brought.

Runs on the command line; called by cli.py and bench/; starts processes of this machine and writes the run's folder.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from verl_mux.coordinator.commands import Keys, fetch_status
from verl_mux.errors import Failure, UserError
from verl_mux.launcher import cores, folders, run_file, run_intervals, run_summary
from verl_mux.launcher.marked_process import MarkedProcess, end_leftovers
from verl_mux.launcher.run_file import RunFile, fill
from verl_mux.launcher.run_intervals import coordinators_lines
from verl_mux.launcher.run_processes import JobProcess, RunCoordinator, filler_process, finish_filler, require_verl
from verl_mux.launcher.watch import SILENCE_S, Watch, nodes_of
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import read_directory

_ANSWER_S = 10.0


def run(
    file: Annotated[Path, typer.Argument(help="The run file, e.g. examples/demo.yaml.")],
    directory: Annotated[Path | None, typer.Option("--dir", help="Write here instead of the file's `dir`.")] = None,
    at: Annotated[
        str | None, typer.Option("--at", help="Start the jobs for the coordinator at this address; the run starts none.")
    ] = None,
    keys: Keys = None,
    submit: Annotated[
        str | None,
        typer.Option("--submit", help="Submit the jobs to the job server of a Ray cluster at this URL, http://HOST:8265."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoints of the run there, as `resume: true`.")
    ] = False,
    only_check: Annotated[
        bool, typer.Option("--check", help="Start nothing: say what is wrong in the file and its jobs' configs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Start a coordinator and several verl jobs, and watch them. Ctrl-C stops all of them cleanly.

    Where the jobs of this file still run because only the watching ended, they are taken up again.
    """
    given = run_file.read(file, directory, resume, {**_elsewhere(file, at, keys), "submit": submit})
    if only_check:
        return _check(file, given)
    result = run_jobs(given)
    print(json.dumps(result, indent=2)) if as_json else print_summary(result, Console())


def _check(file: Path, given: RunFile) -> None:
    from verl_mux.launcher.check import check

    print(f"composing the configs of {', '.join(given.jobs)}", file=sys.stderr, flush=True)
    wrong, notes = check(given)
    print("\n".join([*(f"refused  {text}" for text in wrong), *notes]))
    if wrong:
        raise UserError(f"{file}: nothing would run")
    print(f"{file}: {len(given.jobs)} jobs would start")


def _elsewhere(file: Path, address: str | None, keys: Path | None) -> dict[str, Any]:
    """The nodes of a coordinator that runs already, in a run file's words; nothing where neither `--at` nor the file names one.

    Raises:
        UserError: it does not answer.
    """
    given = run_file.given_by(file)
    given = given if isinstance(given, dict) else {}
    named, folder = (given[key] if isinstance(given.get(key), str) else None for key in ("coordinator", "keys"))
    at, folder = address or named, keys or (Path(folder) if folder else None)
    if at is None:
        return {}
    pools = fetch_status(at, _ANSWER_S, folder)["pools"]
    known = ("host", "gpu_ids", "gpus", "cpus")
    described = {
        name: {"nodes": [{"name": node, **{key: seen[key] for key in known}} for node, seen in pool["nodes"].items()]}
        for name, pool in pools.items()
    }
    return {"at": at, "coordinator": {"pools": described}, **({"keys": str(folder)} if folder else {})}


class UnderWay(msgspec.Struct, frozen=True):
    """What a later launcher has to know of a run that is not finished."""

    started_at: float
    run: RunFile


def run_jobs(run: RunFile) -> dict:
    """Do the run, or see one through that goes on without its launcher. Returns its summary, which is also written to
    `<dir>/summary.json`.

    Raises:
        Failure: a job ended with an error; the message says which and where its log is. Raised when all others are through.
        UserError: the same, and all that failed refused their configuration; or nothing was started, and the message says why.
    """
    require_verl(run)
    with folders.watched(run.directory):
        under_way = _take_up(run) or _start_anew(run)
        coordinator = RunCoordinator(run)
        jobs = [JobProcess(name, spec, run, coordinator.address) for name, spec in run.jobs.items()]
        fillers = [filler_process(name, spec, run, coordinator.address) for name, spec in run.fillers.items()]
        watch = Watch(coordinator, jobs, run.resume, under_way.started_at, cores.Account(run.directory))
        _see_through(watch, coordinator, jobs, fillers)
        # Peak bytes of tagged device memory by node and schedule segment.
        peaks = {node: state["peak_bytes_by_segment"] for node, state in nodes_of(watch.snapshot).items()}
        try:
            (run.directory / "peaks.json").write_text(json.dumps(peaks, indent=2) + "\n")
            result = _finish(run, watch, under_way.started_at)
        except OSError as error:
            raise Failure(f"the run is over, but its summary cannot be written to {run.directory}: {error.strerror}") from None
    if watch.failed and watch.all_ended:  # printed once more at the end: what was printed before has scrolled away
        text = "; ".join(f"job {name} {what}" for name, what in watch.failed.items())
        raise UserError(text) if watch.refused.issuperset(watch.failed) else Failure(text)
    if watch.interrupted:
        raise typer.Exit(130)
    return result


def _take_up(run: RunFile) -> UnderWay | None:
    """The run that an earlier launcher began, if there is still something to see of it."""
    if not (begun := folders.unfinished(run)):
        return None
    before = msgspec.json.decode(folders.under_way(run.directory).read_bytes(), type=UnderWay)
    fields = [name for name in RunFile.__struct_fields__ if name != "resume"]
    if differs := [name for name in fields if getattr(before.run, name) != getattr(run, name)]:
        raise UserError(
            f"jobs in {run.directory} still run ({', '.join(begun)}), and were started with another {', '.join(differs)}:"
            " take them up with the run file as it was, or choose another `dir`"
        )
    print(f"taking up the run in {run.directory}: {', '.join(begun)}", file=sys.stderr)
    return before


def _start_anew(run: RunFile) -> UnderWay:
    end_leftovers(run.directory)
    folders.make_room(run)
    prepare(run)
    under_way = UnderWay(started_at=time.time(), run=msgspec.structs.replace(run, resume=False))
    folders.under_way(run.directory).write_bytes(msgspec.json.encode(under_way))
    return under_way


def prepare(run: RunFile) -> None:
    """Run the file's `prepare` commands side by side; all must succeed.

    Raises:
        UserError: a command cannot be run, or ended with exit code 2. Failure: with another one.
    """
    started: list[tuple[list[str], subprocess.Popen]] = []
    try:
        for command in run.prepare:
            filled = fill(command, run)
            print(f"prepare: {' '.join([*command[:1], *filled[1:]])}", file=sys.stderr)
            try:
                started.append((command, subprocess.Popen(filled, stdout=sys.stderr)))
            except OSError as error:
                raise UserError(f"prepare: cannot run {filled[0]!r}: {error.strerror}") from None
        began, said_at = time.monotonic(), 0.0
        while (running := sum(process.poll() is None for _, process in started)) and not any(p.returncode for _, p in started):
            time.sleep(0.2)
            if (seconds := time.monotonic() - began) - said_at >= SILENCE_S:
                said_at = seconds
                print(f"prepare: {running} of {len(started)} commands run, {seconds:.0f} s", file=sys.stderr, flush=True)
        for command, process in started:
            if process.returncode == 2:  # the code of commands that refuse what they were given, and have said so
                raise UserError(f"prepare: {' '.join(command)} refused")
            if process.returncode:
                raise Failure(f"prepare: {' '.join(command)} ended with exit code {process.returncode}")
    finally:
        for process in (p for _, p in started if p.poll() is None):
            process.kill()
            process.wait()


def _see_through(watch: Watch, coordinator: RunCoordinator, jobs: list[JobProcess], fillers: list[MarkedProcess]) -> None:
    """Watch until all jobs have ended, or until Ctrl-C or SIGTERM, which end them. Whatever else ends the watching, a lost
    terminal for one, leaves them alone."""
    # Not KeyboardInterrupt: raised within a destructor it is lost. And a second Ctrl-C must not leave processes behind.
    before = {number: signal.signal(number, watch.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        watch.take_up()
        coordinator.begin()
        log = f" (log: {coordinator.log_path})" if coordinator.own else ""
        print(f"coordinator at {coordinator.address}{log}", file=sys.stderr, flush=True)
        for filler in fillers:
            filler.begin()
        watch.until_all_ended()
        for filler in fillers:
            if trouble := finish_filler(filler):
                print(trouble, file=sys.stderr, flush=True)
        for job in jobs:
            job.stop()
        watch.snapshot = coordinator.snapshot() or watch.snapshot
        coordinator.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(run: RunFile, watch: Watch, started_at: float) -> dict:
    """The summary, on disk and returned."""
    names, directory, config = list(run.jobs), run.directory, run.coordinator_config()
    spans = run_intervals.read(directory, names)
    startup_s = run_summary.startup(spans, started_at)
    result = run_summary.summarise(spans, config, names, watch.peak_rss, startup_s, cores.read(directory))
    # Of a run that goes on, the figures are of its earlier steps too.
    result["steps_made"] = sum(span.end >= started_at for job in names for span in spans.of(job, "steps"))
    if config.placement is not None:
        result["groups"] = run_summary.group_periods(coordinators_lines(directory, events.GROUP_PREDICTED), spans)
        result["moves"] = run_summary.read_moves(directory, spans)
    if (agents := directory / run_file.AGENTS).is_dir():  # of agents that were started with --log-dir DIR/agents
        since = 0.0 if run.resume else started_at
        result["hosts"] = run_intervals.hosts_by_side((it for it in read_directory(agents) if it.end >= since), run.jobs)
    if run.fillers:  # by node, the share of the time without a job that fillers used, from the first lease on
        result["bubble_filled"] = {node: state["usage"]["bubble_filled"] for node, state in nodes_of(watch.snapshot).items()}
    (directory / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    folders.under_way(directory).unlink(missing_ok=True)
    print(f"summary: {directory / 'summary.json'}", file=sys.stderr)
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
    if result["jobs"] and not result["steps_made"]:
        console.print("no step was made in this run: the figures are of the run that it went on from")
    for group in result.get("groups", ()):
        both = f"predicted {group['predicted_period_s']:.2f} s, measured {group['measured_period_s']:.2f} s"
        console.print(f"group {group['group']} ({', '.join(group['jobs'])}): {both} ({group['difference']:+.1%})")
    for move in result.get("moves", ()):
        console.print(run_summary.move_sentence(move))
    mux = result["mux"]
    ratio, tokens = mux["throughput_ratio"], mux["token_throughput_ratio"]
    bubbles = ", ".join(f"{pool} {share:.0%}" for pool, share in mux["bubble"].items() if share is not None)
    gain = f"{ratio:.2f}x in steps, {tokens:.2f}x in tokens" if ratio and tokens else "not measured"
    console.print(f"interleaved over one after the other: {gain}", *cores.sentences(mux), sep="\n")
    memory = f"host memory: {mux['peak_rss_bytes'] / 2**30:.1f} GiB; start-up: {mux['startup_s']:.0f} s"
    console.print(f"idle: {bubbles or 'not measured'}; {memory}")
