"""`verl-mux report`: read a directory of event logs, say where the time went, and what would have changed it.

Runs on the command line, called by cli.py; joins profiling, which reads, with what_if, which runs again what was read.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_mux.errors import Failure, UserError


def report(
    directory: Annotated[Path, typer.Argument(help="Holds step_<N>/worker_<R>.jsonl, at any depth; or a file of OTLP JSON.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page that opens without a network.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev or chrome://tracing.")] = None,
    otlp: Annotated[Path | None, typer.Option(help="Write all events as OpenTelemetry spans: OTLP JSON lines.")] = None,
    against: Annotated[Path | None, typer.Option(help="Another run to compare with.")] = None,
    advise: Annotated[bool, typer.Option("--advise", help="Say which keys are worth trying, and what each would bring.")] = False,
    what_if: Annotated[
        list[str] | None, typer.Option(help="key=value: what the run would have taken under it; may be repeated, all at once.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Only these steps, as in 3-7 or 5.")] = None,
    processes: Annotated[int, typer.Option(help="Processes that read; 0 takes one a core, at most 8.", min=0)] = 0,
) -> None:
    """Say where the time of a run went: shares, long tails, stalls, slow requests, bubbles, waits."""
    from rich.console import Console

    from verl_mux.profiling.plain.lines import find_log_files
    from verl_mux.profiling.report.formats.foreign import write_as_log
    from verl_mux.profiling.report.formats.otlp import write_otlp
    from verl_mux.profiling.report.output import console
    from verl_mux.profiling.report.output.page.page import make_page
    from verl_mux.profiling.report.output.summary import compare, summarise
    from verl_mux.profiling.report.output.trace import write_trace

    window, changed_keys = _steps(steps), _keys(what_if or [])
    with tempfile.TemporaryDirectory() as folder:
        log = directory
        if directory.is_file() or directory.is_dir() and not find_log_files(directory):
            write_as_log(directory, log := Path(folder))
        analysis = _analyse(log, window, processes)
        if otlp is not None:
            _write(otlp, lambda path: write_otlp(analysis.run.files, path), " spans")
    summary = summarise(analysis)
    if against is not None:
        other = summarise(_analyse(against, window, processes))
        summary["against"] = {"directory": str(against), "figures": compare(summary, other)}
    if advise or changed_keys:
        from verl_mux.what_if.advice import advise as run_again

        summary["advice"] = run_again(analysis, changed_keys)
    if html is not None:
        _write(html, lambda path: path.write_text(make_page(analysis, summary), encoding="utf-8"))
    if trace is not None:
        _write(trace, lambda path: write_trace(analysis, path))
    if json:
        print(jsonlib.dumps(summary))
        return
    out = Console()
    out.print(console.render(summary, str(directory)))
    if against is not None:
        out.print(console.render_comparison(summary["against"]["figures"], str(directory), str(against)))
    for line in summary.get("advice", {"lines": ()})["lines"]:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _write(path: Path, write: Callable[[Path], int], counted: str = "") -> None:
    """Make the file's folder, write it, and say so; with what `write` returns where that counts something."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = write(path)
    except OSError as error:
        raise Failure(f"cannot write {error.filename}: {error.strerror}") from error
    print(f"wrote {path}" + (f": {count}{counted}" if counted else ""), file=sys.stderr)


def _keys(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise UserError(f"--what-if {text}: give key=value, as in data.max_response_length=600")
    return dict(text.split("=", 1) for text in texts)


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    try:
        window = int(first), int(last) if dash else int(first)
    except ValueError:
        raise UserError(f"--steps {text}: give one step or a range, as in 5 or 3-7") from None
    if window[1] < window[0]:
        raise UserError(f"--steps {text}: the range ends before it begins")
    return window


def _analyse(directory: Path, steps: tuple[int, int] | None, processes: int) -> Any:
    """Read a directory behind a bar on stderr, which a terminal shows for long reads."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from verl_mux.profiling.plain.lines import find_log_files
    from verl_mux.profiling.report.input.run_log import read_files
    from verl_mux.profiling.report.measures.analysis import Analysis

    files = find_log_files(directory)
    if steps is not None:
        files = [file for file in files if steps[0] <= file.step <= steps[1]]
    if not files:
        chosen = "" if steps is None else f" with steps {steps[0]} to {steps[1]}"
        raise UserError(f"{directory} holds no event log (step_<N>/worker_<R>.jsonl){chosen}: nothing to report")
    console = Console(stderr=True)
    columns = [TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=sum(file.size for file in files))
        run = read_files(directory, files, processes or min(os.cpu_count() or 1, 8), lambda nbytes: bar.advance(task, nbytes))
    return Analysis(run)
