"""The pictures in docs: `python -m tests.profiling.pictures RUN OUT`, RUN the folder of a run with its jobs' event logs.

OUT/report.png: the top of the report's page, in Chromium. OUT/top.png: `verl-mux top RUN` in a terminal of tmux, drawn by rich.
"""

from __future__ import annotations

import io
import shlex
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.profiling.browser import Browser
from tests.profiling.terminal import Terminal
from verl_mux.profiling.plain.files import find_log_files
from verl_mux.profiling.report.input.run_log import read_files
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.page.page import make_page
from verl_mux.profiling.report.output.summary import summarise

READY = 'document.documentElement.dataset.ready === "yes"'
COLUMNS = 150


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
    with tempfile.TemporaryDirectory() as folder, Browser(width=1240, height=640) as browser:
        page = Path(folder) / "top.svg"
        page.write_text(screen.export_svg(title=f"verl-mux top {run.name}"))
        browser.open(page.as_uri(), "document.readyState === 'complete'")
        browser.frame()
        browser.picture(out, whole=False)


def _captured(run: Path) -> str:
    """The first screen on which a job stands."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(Path(folder) / "tmux", f"{sys.executable} -m verl_mux top {shlex.quote(str(run))}")
        try:
            terminal.until(lambda text: "job ^" in text)
            return terminal("capture-pane", "-e", "-p").stdout.rstrip()
        finally:
            terminal("kill-server")


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    report(source, target / "report.png")
    top(source, target / "top.png")
