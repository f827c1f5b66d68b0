"""The pictures in docs: `python -m tests.profiling.pictures OUT [RUN]`, RUN the folder of a run with its jobs' event logs.

OUT/report.png: the top of the report's page, in Chromium. OUT/top.png: `verl-mux top RUN` in a terminal of tmux, drawn by rich.
Without RUN they show a made one (tests/profiling/blind): two jobs that take turns on two nodes, a replica of one slow from step 6
on; for `top` its log ends in the middle.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.profiling.blind.runs import draw, play, write_lines
from tests.profiling.browser import Browser
from tests.profiling.terminal import Terminal
from verl_mux.profiling.plain.lines import find_log_files
from verl_mux.profiling.report.input.run_log import read_files
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.page.page import make_page
from verl_mux.profiling.report.output.summary import summarise

RUN_NAME = "two_jobs"
MIDDLE = 0.5  # of the made run's time
COLUMNS = 134
READY = 'document.documentElement.dataset.ready === "yes"'


def report(run: Path, out: Path) -> None:
    """The page as it opens, as far down as the requests."""
    analysis = Analysis(read_files(run, find_log_files(run)))
    with tempfile.TemporaryDirectory() as folder, Browser(width=1280, height=1500) as browser:
        page = Path(folder) / "page.html"
        page.write_text(make_page(analysis, summarise(analysis)))
        browser.open(page.as_uri(), READY)
        browser.frame()
        browser.picture(out, whole=False)


def top(run: Path, out: Path) -> None:
    """What a terminal shows, with its colours."""
    screen = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    screen.print(Text.from_ansi(_captured(run)))
    with tempfile.TemporaryDirectory() as folder, Browser(width=1240, height=900) as browser:
        page = Path(folder) / "top.svg"
        page.write_text(screen.export_svg(title=f"verl-mux top {run.name}"))
        browser.open(page.as_uri(), "document.readyState === 'complete'")
        # The drawing is scaled to the window and stands in its middle; the picture holds it alone.
        shape = browser.evaluate("(({ width, height }) => height / width)(document.documentElement.viewBox.baseVal)")
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=1240, height=round(1240 * shape), deviceScaleFactor=1, mobile=False
        )
        browser.frame()
        browser.picture(out, whole=False)


def _captured(run: Path) -> str:
    """The first screen on which a job stands."""
    with tempfile.TemporaryDirectory() as folder:
        command = f"{sys.executable} -m verl_mux top {shlex.quote(str(run))}"
        terminal = Terminal(Path(folder) / "tmux", command, columns=COLUMNS)
        try:
            terminal.until(lambda text: re.search(r": [1-9]\d* jobs", text) is not None)
            return terminal("capture-pane", "-e", "-p").stdout.rstrip()
        finally:
            terminal("kill-server")


def made(directory: Path, part: float) -> Path:
    """A made run, up to a part of its time."""
    run = draw(1, "multiplexed", "slow_replica")
    played = play(run)
    times = [at for lines in played.files.values() for at, _ in lines]
    until = min(times) + part * (max(times) - min(times))
    begun = {place: [line for line in lines if line[0] <= until] for place, lines in played.files.items()}
    played.files = {place: lines for place, lines in begun.items() if lines}
    write_lines(directory / RUN_NAME, played)
    return directory / RUN_NAME


def main(out: Path, run: Path | None = None) -> None:
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as half:
        report(run or made(Path(whole), 1.0), out / "report.png")
        top(run or made(Path(half), MIDDLE), out / "top.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
