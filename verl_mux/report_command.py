"""`verl-mux report`: reads a directory of event logs, says where the time went, and what would have changed it.

Joins two rooms that do not know each other: profiling, which reads, and simulation, which runs what was read again.
"""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_mux.errors import Failure, UserError


def report(
    directory: Annotated[Path, typer.Argument(help="Holds step_<N>/worker_<R>.jsonl, at any depth; or a file of OTLP JSON.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page that opens without a network.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write pictures into this directory.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev or chrome://tracing.")] = None,
    otlp: Annotated[Path | None, typer.Option(help="Write all events as OpenTelemetry spans: OTLP JSON lines.")] = None,
    against: Annotated[Path | None, typer.Option(help="Another run to compare with.")] = None,
    engine_log: Annotated[
        list[Path] | None, typer.Option(help="An SGLang server's text log, for its decode lines; may be repeated.")
    ] = None,
    advise: Annotated[bool, typer.Option("--advise", help="Say which keys are worth trying, and what each would bring.")] = False,
    what_if: Annotated[
        list[str] | None, typer.Option(help="key=value: what the run would have taken under it; may be repeated, all at once.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Only these steps, as in 3-7 or 5.")] = None,
    processes: Annotated[int, typer.Option(help="Processes that read; 0 takes one a core, at most 8.", min=0)] = 0,
) -> None:
    """Say where the time of a run went: shares, long tails, stalls, slow requests, bubbles, waits."""
    if png is not None:
        import matplotlib  # noqa: F401  missed now and not after the reading
    from rich.console import Console

    from verl_mux.profiling.report.output import comparison, console
    from verl_mux.profiling.report.output.summary import summarise

    window, tried = _steps(steps), _keys(what_if or [])
    with _as_log(directory) as log:
        analysis = _analyse(log, engine_log or [], window, processes)
        _write_otlp(analysis, otlp)
    summary = summarise(analysis)
    other = None if against is None else _analyse(against, [], window, processes)
    if other is not None:
        summary["against"] = {"directory": str(against), "figures": comparison.compare(summary, summarise(other))}
    if advise or tried:
        from verl_mux.what_if.advice import advise as run_again

        summary["advice"] = run_again(analysis, tried)
    _write(analysis, summary, other, html, png, trace)
    if json:
        print(jsonlib.dumps(summary))
        return
    out = Console()
    out.print(console.render(summary, str(directory)))
    if against is not None:
        out.print(console.render_comparison(summary["against"]["figures"], str(directory), str(against)))
    for line in summary.get("advice", {"lines": ()})["lines"]:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _as_log(source: Path) -> Iterator[Path]:
    """A directory of event logs: the given one, or spans of a file as one for so long."""
    if not source.is_file():
        yield source
        return
    from verl_mux.profiling.report.input.otlp import write_as_log

    with tempfile.TemporaryDirectory() as directory:
        write_as_log(source, Path(directory))
        yield Path(directory)


def _write_otlp(analysis: Any, path: Path | None) -> None:
    if path is None:
        return
    from verl_mux.profiling.report.output.otlp import write_otlp

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = write_otlp(analysis.run.files, path)
    except OSError as error:
        raise Failure(f"cannot write {error.filename}: {error.strerror}") from error
    print(f"wrote {path}: {count} spans", file=sys.stderr)


def _keys(given: list[str]) -> dict[str, str]:
    for text in given:
        if "=" not in text:
            raise UserError(f"--what-if {text}: give key=value, as in data.max_response_length=600")
    return dict(text.split("=", 1) for text in given)


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


def _analyse(directory: Path, engine_logs: list[Path], steps: tuple[int, int] | None, processes: int) -> Any:
    from verl_mux.profiling.plain.lines import find_log_files
    from verl_mux.profiling.report.input.line_reader import read_engine_log
    from verl_mux.profiling.report.input.run_log import read_files
    from verl_mux.profiling.report.measures.analysis import Analysis

    files = find_log_files(directory)
    if steps is not None:
        files = [file for file in files if steps[0] <= file.step <= steps[1]]
    if not files:
        chosen = "" if steps is None else f" with steps {steps[0]} to {steps[1]}"
        print(f"verl-mux: {directory} holds no step_<N>/worker_<R>.jsonl{chosen}; the report is empty", file=sys.stderr)
    for path in engine_logs:
        if not path.is_file():
            raise UserError(f"--engine-log {path}: no such file")
    with _Progress(sum(file.size for file in files)) as progress:
        run = read_files(directory, files, processes or min(os.cpu_count() or 1, 8), progress.advance)
    texts = [read_engine_log(path, number) for number, path in enumerate(engine_logs)]
    return Analysis(run, tuple(texts))


class _Progress:
    """A bar on stderr for long reads, on a terminal only."""

    def __init__(self, nbytes: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = [TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()]
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("reading", total=nbytes)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, nbytes: int) -> None:
        self._bar.advance(self._task, nbytes)


def _write(analysis: Any, summary: dict[str, Any], other: Any, html: Path | None, png: Path | None, trace: Path | None) -> None:
    try:
        if html is not None:
            from verl_mux.profiling.report.output.page.page import make_page

            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(make_page(analysis, summary, other), encoding="utf-8")
            print(f"wrote {html}", file=sys.stderr)
        if png is not None:
            from verl_mux.profiling.report.output.figures import draw

            for path in draw(analysis, summary, png):
                print(f"wrote {path}", file=sys.stderr)
        if trace is not None:
            from verl_mux.profiling.report.output.trace import write_trace

            trace.parent.mkdir(parents=True, exist_ok=True)
            write_trace(analysis, trace)
            print(f"wrote {trace}", file=sys.stderr)
    except OSError as error:
        raise Failure(f"cannot write {error.filename}: {error.strerror}") from error
