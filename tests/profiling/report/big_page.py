"""The page of a large run in a headless Chromium: `python -m tests.profiling.report.big_page [STEPS] [REPLICAS]`, 1000 and 64.

Prints one JSON object: seconds until the page is ready (three times, cold), milliseconds of a frame while it is scrolled, zoomed
and moved (the median, and the one in twenty), and what the page holds.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.profiling.browser import Browser
from verl_mux.bench.made_log import LAYOUTS
from verl_mux.profiling.plain.files import find_log_files
from verl_mux.profiling.report.input.run_log import read_files
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.page import make_page
from verl_mux.profiling.report.output.summary import summarise

READY = 'document.documentElement.dataset.ready === "yes"'
REQUESTS = 32  # of a worker and step, so 256 a step
FRAMES = 60
HELD = "[S.steps, S.replicas.length, DATA.requests.count, DATA.requests.of, Object.keys(DATA.requests.names).length]"
# Each frame does something: the page is scrolled, the view zoomed and moved.
MOVE = """
new Promise((done) => {
  const took = [];
  let at = 0, last = performance.now();
  const next = () => {
    const now = performance.now();
    if (at) took.push(now - last);
    last = now;
    if (at++ === COUNT) return done(took);
    if (at % 3 === 0) zoom(at % 2 ? 0.7 : 1 / 0.6);
    else if (at % 3 === 1) shift(0.1 * (view.to - view.from));
    else window.scrollTo(0, (at * 97) % document.body.scrollHeight);
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})
"""


def measure(steps: int, replicas: int) -> dict:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder:
        directory, page = Path(folder) / "run", Path(folder) / "page.html"
        rng, events = random.Random(0), 0
        for step in range(1, steps + 1):
            for path, lines in LAYOUTS["ours"](rng, step, replicas, REQUESTS):
                events += len(lines)
                (directory / path).parent.mkdir(parents=True, exist_ok=True)
                (directory / path).write_text("".join(lines))
        analysis = Analysis(read_files(directory, find_log_files(directory)))
        page.write_text(make_page(analysis, summarise(analysis)))
        opened = [_opened(page) for _ in range(3)]
        with Browser() as browser:
            browser.open(page.as_uri(), READY)
            frames = sorted(browser.evaluate(MOVE.replace("COUNT", str(FRAMES))))
            held = browser.evaluate(
                "[S.steps, S.replicas.length, DATA.requests.count, DATA.requests.of, Object.keys(DATA.requests.names).length]"
            )
        names = ("steps", "replicas", "drawn", "requests", "lives")
        return {
            "events": events, "page_mb": round(page.stat().st_size / 1e6, 1), "open_s": [round(it, 2) for it in opened],
            "frame_ms": round(median(frames), 1), "frame_ms_p95": round(frames[int(0.95 * len(frames))], 1),
            **dict(zip(names, held, strict=True)),
        }  # fmt: skip


def _opened(page: Path) -> float:
    with Browser() as browser:
        began = time.perf_counter()
        browser.open(page.as_uri(), READY)
        browser.frame()
        return time.perf_counter() - began


if __name__ == "__main__":
    given = [int(it) for it in sys.argv[1:]]
    print(json.dumps(measure(*(given or (1000, 64)))))
