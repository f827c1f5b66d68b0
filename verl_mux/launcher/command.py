"""`verl-mux run FILE.yaml`: coordinator and jobs, a live view, and a summary of what multiplexing brought."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from verl_mux.coordinator.commands import Keys, fetch_status
from verl_mux.coordinator.core.settings import Config
from verl_mux.errors import Failure, UserError
from verl_mux.launcher import cores, folders, run_file, run_intervals, run_summary
from verl_mux.launcher.prepare import clean_up, prepare
from verl_mux.launcher.processes.agent_process import AgentProcess
from verl_mux.launcher.processes.coordinator_process import AnyCoordinator, CoordinatorElsewhere, CoordinatorProcess
from verl_mux.launcher.processes.filler_process import FillerProcess
from verl_mux.launcher.processes.job_process import JobProcess, require_verl
from verl_mux.launcher.processes.marked_process import end_leftovers
from verl_mux.launcher.run_file import RunFile
from verl_mux.launcher.watch import Watch
from verl_mux.yaml_file import read_yaml

_ANSWER_S = 10.0


def run(
    file: Annotated[Path, typer.Argument(help="The run file, e.g. examples/demo.yaml.")],
    directory: Annotated[Path | None, typer.Option("--dir", help="Write here instead of the file's `dir`.")] = None,
    at: Annotated[
        str | None, typer.Option("--at", help="Start the jobs for the coordinator at this address; the run starts none.")
    ] = None,
    keys: Keys = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoints of the run there, as `resume: true`.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Start a coordinator and several verl jobs, and watch them. Ctrl-C stops all of them cleanly.

    Where the jobs of this file still run because only the watching ended, they are taken up again.
    """
    result = run_jobs(run_file.read(file, directory, resume, _elsewhere(file, at, keys)))
    print(json.dumps(result, indent=2)) if as_json else print_summary(result, Console())


def _elsewhere(file: Path, address: str | None, keys: Path | None) -> dict[str, Any]:
    """The nodes of a coordinator that runs already, in a run file's words; nothing where neither `--at` nor the file names one.

    Raises:
        UserError: it does not answer.
    """
    keys_of_file = read_yaml(file)
    keys_of_file = keys_of_file if isinstance(keys_of_file, dict) else {}
    named = keys_of_file.get("coordinator")
    at = address or (named if isinstance(named, str) else None)
    if at is None:
        return {}
    folder = keys or (Path(keys_of_file["keys"]) if isinstance(keys_of_file.get("keys"), str) else None)
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
    require_verl()
    with folders.watched(run.directory):
        under_way = _take_up(run) or _start_anew(run)
        coordinator = CoordinatorElsewhere(run.at, run.keys_folder()) if run.at else CoordinatorProcess(run)
        jobs = [JobProcess(name, spec, run, coordinator.address) for name, spec in run.jobs.items()]
        fillers = [FillerProcess(name, spec, run, coordinator.address) for name, spec in run.fillers.items()]
        agents = [AgentProcess(host, run, coordinator.address) for host in run_file.agent_hosts(run)]
        watch = Watch(coordinator, jobs, run.resume, under_way.started_at, cores.Account(run.directory))
        try:
            interrupted = _see_through(run, watch, coordinator, jobs, fillers, agents)
        except (UserError, Failure):
            if not watch.begun:
                clean_up(run)
            raise
        result = _finish(run, watch, under_way.started_at)
        clean_up(run)
    _raise_for_failed(watch)
    if interrupted:
        raise typer.Exit(130)
    return result


def _take_up(run: RunFile) -> UnderWay | None:
    """The run that a launcher which is no more began, if there is still something to see of it."""
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
    try:
        prepare(run)
    except (UserError, Failure):
        clean_up(run)
        raise
    under_way = UnderWay(started_at=time.time(), run=msgspec.structs.replace(run, resume=False))
    folders.under_way(run.directory).write_bytes(msgspec.json.encode(under_way))
    return under_way


def _see_through(
    run: RunFile,
    watch: Watch,
    coordinator: AnyCoordinator,
    jobs: list[JobProcess],
    fillers: list[FillerProcess],
    agents: list[AgentProcess],
) -> bool:
    """Until all jobs have ended, or until Ctrl-C or SIGTERM: that ends them, and gives True. Whatever else ends the watching, a
    lost terminal for one, leaves them alone."""
    # Not KeyboardInterrupt: raised within a destructor it is lost. And a second Ctrl-C must not leave processes behind.
    before = {number: signal.signal(number, watch.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        watch.take_up()
        coordinator.begin()
        log = f" (log: {coordinator.log_path})" if isinstance(coordinator, CoordinatorProcess) else ""
        print(f"coordinator at {coordinator.address}{log}", file=sys.stderr, flush=True)
        for beside in (*agents, *fillers):
            beside.begin()
        watch.until_all_ended()
        for filler in fillers:
            if trouble := filler.finish():
                print(trouble, file=sys.stderr, flush=True)
        for process in (*jobs, *agents):
            process.stop()
        watch.snapshot = coordinator.snapshot() or watch.snapshot
        _keep_peaks(watch.snapshot, run.directory)
        coordinator.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return watch.interrupted


def _keep_peaks(snapshot: dict[str, Any], directory: Path) -> None:
    """Peak bytes of tagged device memory by node and schedule segment."""
    pools = snapshot.get("pools", {}).values()
    peaks = {node: state["peak_bytes_by_segment"] for pool in pools for node, state in pool["nodes"].items()}
    (directory / "peaks.json").write_text(json.dumps(peaks, indent=2) + "\n")


def _finish(run: RunFile, watch: Watch, started_at: float) -> dict:
    """The summary, on disk and returned."""
    names, directory, config = list(run.jobs), run.directory, run.coordinator_config()
    spans = run_intervals.read(directory, names)
    startup_s = run_summary.startup(spans, started_at)
    result = run_summary.summarise(spans, config, names, watch.peak_rss, startup_s, cores.read(directory))
    if config.placement is not None:
        result["groups"] = run_intervals.group_periods(run_intervals.read_predictions(directory), spans)
        result["moves"] = run_intervals.read_moves(directory, spans)
    if run.hosts and run.agents:
        result["hosts"] = run_intervals.read_hosts(run)
    if run.fillers:
        result["bubble_filled"] = _bubble_filled(watch.snapshot)
    (directory / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    _draw(spans, config, names, directory)
    folders.under_way(directory).unlink(missing_ok=True)
    print(f"summary: {directory / 'summary.json'}   picture: {directory / 'lanes.png'}", file=sys.stderr)
    return result


def _bubble_filled(snapshot: dict[str, Any]) -> dict[str, float | None]:
    """By node, what share of the time in which no job held it fillers did, from the first lease on it to the end."""
    pools = snapshot.get("pools", {}).values()
    return {node: state["usage"]["bubble_filled"] for pool in pools for node, state in pool["nodes"].items()}


def _draw(spans: run_intervals.Timeline, config: Config, names: list[str], directory: Path) -> None:
    try:
        run_summary.draw(spans, config, names, directory / "lanes.png")
    except ImportError:
        print("no picture: pip install 'verl-mux[plots]'", file=sys.stderr)


def _raise_for_failed(watch: Watch) -> None:
    """Said at the end once more, whatever was said in between has scrolled away."""
    if not watch.failed or not watch.all_ended:
        return
    text = "; ".join(f"job {name} {what}" for name, what in watch.failed.items())
    raise UserError(text) if watch.refused.issuperset(watch.failed) else Failure(text)


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
    for move in result.get("moves", ()):
        console.print(run_intervals.move_sentence(move))
    for line in _overall(result["mux"]):
        console.print(line)


def _overall(mux: dict) -> list[str]:
    ratio, tokens = mux["throughput_ratio"], mux["token_throughput_ratio"]
    bubbles = ", ".join(f"{pool} {share:.0%}" for pool, share in mux["bubble"].items() if share is not None)
    gain = f"{ratio:.2f}x in steps, {tokens:.2f}x in tokens" if ratio and tokens else "not measured"
    memory = f"{mux['peak_rss_bytes'] / 2**30:.1f} GiB"
    return [
        f"interleaved over one after the other: {gain}",
        *cores.sentences(mux),
        f"idle: {bubbles or 'not measured'}; host memory: {memory}; start-up: {mux['startup_s']:.0f} s",
    ]
