"""`python -m tests.profiling.report.big_page`: the page of a large run in a headless Chromium: how long it takes to open, and how
long between two frames while it scrolls, zooms and moves.

The run is made: 1,000 steps on 64 replicas, 512 requests a step, unless said otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.made_log import LAYOUTS, Layout, our_step
from tests.profiling.browser import Browser

READY = 'document.documentElement.dataset.ready === "yes"'
RUN_REPORT = "import typer; from verl_mux.report_command import report; typer.run(report)"
# Milliseconds between painted frames while `act(n)` is called before each.
FRAMES = """new Promise((done) => {
  const act = %s, gaps = [];
  let last = null, n = 0;
  const tick = (now) => {
    if (last !== null) gaps.push(now - last);
    last = now;
    if (n >= 60) return done(gaps);
    act(n++);
    requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
})"""
ACTS = {
    "scroll": "(n) => window.scrollTo(0, (document.body.scrollHeight - innerHeight) * (n / 59))",
    "zoom": "(n) => zoom(n < 30 ? 0.9 : 1 / 0.9)",
    "move": "(n) => shift((n < 30 ? 0.02 : -0.02) * (view.to - view.from))",
    "open row": "(n) => { openLane = 3; zoom(n < 30 ? 0.9 : 1 / 0.9); }",
}


def make(directory: Path, steps: int, layout: Layout) -> None:
    """The run's log."""
    rng = random.Random(0)
    for step in range(1, steps + 1):
        for path, lines in our_step(rng, layout, step):
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text("".join(lines))


def measure(page: Path, opens: int) -> dict:
    """opened_s: from the browser being told to load the page until it is ready and painted, of each of `opens` times."""
    with Browser() as browser:
        opened = [_open(browser, page) for _ in range(opens)]
        frames = {}
        for name, act in ACTS.items():
            browser.evaluate("(openLane = null, setView(0, DATA.length), window.scrollTo(0, 0), $('lanes').scrollIntoView())")
            browser.frame()
            gaps = sorted(browser.evaluate(FRAMES % act))
            frames[name] = {"median_ms": round(statistics.median(gaps), 1), "p95_ms": round(gaps[int(0.95 * len(gaps))], 1)}
        browser.evaluate("showLife(0)")
        drawn = browser.evaluate("[DATA.requests.count, DATA.requests.of, LIVES.names.length, LIVES.at.length]")
        if browser.logged:
            raise RuntimeError(f"the page said {browser.logged}")
    told = dict(zip(("drawn", "requests", "lives", "stretches"), drawn, strict=True))
    return {"page_mb": round(page.stat().st_size / 1e6, 1), "opened_s": opened, "frames": frames, **told}


def _open(browser: Browser, page: Path) -> float:
    browser.call("Page.navigate", url="about:blank")
    began = time.perf_counter()
    browser.open(page.as_uri(), READY)
    browser.frame()
    return round(time.perf_counter() - began, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=512, help="a step")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--opens", type=int, default=3)
    parser.add_argument("--page", type=Path, help="this page, and no made run")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        page, told = asked.page, {}
        if page is None:
            make(
                Path(scratch),
                asked.steps,
                replace(LAYOUTS["ours"], replicas=asked.replicas, requests=asked.requests // LAYOUTS["ours"].workers),
            )
            page = Path(scratch) / "page.html"
            began = time.perf_counter()
            command = [sys.executable, "-c", RUN_REPORT, scratch, "--html", str(page), "--processes", str(os.cpu_count())]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            told = {"written_s": round(time.perf_counter() - began, 1)}
        print(json.dumps(told | measure(page, asked.opens)))


if __name__ == "__main__":
    main()
