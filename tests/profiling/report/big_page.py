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
from pathlib import Path

from tests.profiling.blind.log import Lines
from tests.profiling.blind.runs import write_lines
from tests.profiling.browser import Browser

READY = 'document.documentElement.dataset.ready === "yes"'
STEP_S, WORKERS, ON_NODE, TOKENS_PER_SEC = 100.0, 8, 8, 40.0
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


def make(directory: Path, steps: int, replicas: int, requests: int) -> None:
    """The run's log: requests of one to three turns, their stays in replicas, the replicas' counters, the trainer."""
    rng = random.Random(0)
    for step in range(1, steps + 1):
        lines, start, ends = Lines(), STEP_S * step, [0.0]
        stays: list[list[tuple[float, float]]] = [[] for _ in range(replicas)]
        for number in range(requests):
            replica = (number + step) % replicas
            ends.append(_request(lines, rng, start + 0.5, step, number, replica, stays[replica]))
        for replica, its in enumerate(stays):
            _counters(lines, start + 0.5, step, replica, its)
        for event, end, seconds in (
            ("sync", start + 0.4, 0.4),
            ("generate", max(ends), max(ends) - start - 0.4),
            ("old_log_prob", max(ends) + 4.0, 4.0),
            ("update_actor", max(ends) + 16.0, 12.0),
            ("step", max(ends) + 16.1, max(ends) + 16.1 - start),
        ):
            figures = {"reward": 0.5, "response_length": 700.0, "tokens": 700_000} if event == "step" else {}
            lines.say("big", "trainer", 0, step, end, event, seconds, **figures)
        write_lines(directory, lines)


def _request(
    lines: Lines, rng: random.Random, start: float, step: int, number: int, replica: int, stays: list[tuple[float, float]]
) -> float:
    """When it is over."""
    own = {"request_id": f"{rng.getrandbits(128):032x}_{number % 8}"}
    who = {**own, "batch_data_id": str(step), "session": 0, "validate": False}
    at, turns, tokens = start, 1 + (rng.random() < 0.5) + (rng.random() < 0.2), 0

    def say(end: float, event: str, seconds: float | None = None, role: str = "rollout", **extra) -> None:
        lines.say("big", role, replica if role == "server" else number % WORKERS, step, end, event, seconds, **(own | extra))

    say(at, "request_start", **who)
    for turn in range(1, turns + 1):
        seconds, queue = rng.uniform(5.0, 25.0), rng.uniform(0.002, 0.05)
        generated = int(TOKENS_PER_SEC * seconds)
        place = {"turn": turn, "stay": turn, "replica": replica, "node": f"r{replica // ON_NODE}"}
        both = {**place, "prompt_tokens": 128 + tokens, "response_tokens": generated, "version": step - 1}
        both |= {"queue_sec": queue, "held_sec": 0.0}
        figures = {"finish": "stop", "priority": 0, "prefill_sec": 0.05, "decode_sec": seconds - 0.05, "retractions": 0}
        say(at + 0.01, "turn_pre_process", 0.01, turn=turn)
        at += 0.01 + queue + seconds
        tokens += generated
        stays.append((at - seconds, at))
        say(at, "turn_engine_call", queue + seconds, **both, finish_reason="stop")
        say(at - seconds, "engine_queue", queue, "server", **place, priority=None)
        say(at - 0.001, "engine_generate", queue + seconds - 0.001, "server", **both, **figures, cached_tokens=0)
        if turn < turns:
            tool = rng.uniform(0.2, 0.6)
            at += tool
            say(at, "tool_execution", tool, turn=turn, tool="search")
    at += 0.01
    say(at, "reward_calculation", 0.008, score=1.0)
    say(at, "finalization", 0.009)
    done = {"turns": turns, "stays": turns, "finish_reason": "stop", "response_length": tokens, "score": 1.0, "parked_sec": 0.0}
    say(at, "async_rollout_request_complete", at - start, **who, **done)
    return at


def _counters(lines: Lines, start: float, step: int, replica: int, stays: list[tuple[float, float]]) -> None:
    """One a second while a request is in the engine."""
    for second in range(1, int(max((end for _, end in stays), default=start) - start) + 1):
        if running := sum(begin <= start + second < end for begin, end in stays):
            counted = {"running": running, "queued": 0, "token_usage": 0.02 * running, "retracted": 0, "evicted_tokens": 0}
            counted |= {"tokens_per_sec": TOKENS_PER_SEC * running, "prefill_tokens_per_sec": 12.0}
            place = {"replica": replica, "node": f"r{replica // ON_NODE}"}
            lines.say("big", "server", replica, step, start + second, "engine_decode", 1.0, **place, **counted)


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
            make(Path(scratch), asked.steps, asked.replicas, asked.requests)
            page = Path(scratch) / "page.html"
            began = time.perf_counter()
            command = [sys.executable, "-c", RUN_REPORT, scratch, "--html", str(page), "--processes", str(os.cpu_count())]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            told = {"written_s": round(time.perf_counter() - began, 1)}
        print(json.dumps(told | measure(page, asked.opens)))


if __name__ == "__main__":
    main()
