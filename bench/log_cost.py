"""`verl-mux bench log`: what an event costs its caller, and (`--real`) what the log costs a step of a real job.

An event: many asyncio requests at once log as the agent loops do, turn by turn. The cost is taken around each call, and again
as the difference between the whole loop with the log on and off, in turns. A step: see log_cost_in_run.py.
"""

from __future__ import annotations

import asyncio
import json as json_module
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.line_writer import writer
from verl_mux.profiling.eventlog.log import NULL_LOG, EventLog

EVENTS_A_TURN = 4


def measure(requests: int = 1024, turns: int = 4, rounds: int = 10) -> dict[str, Any]:
    """Microseconds an event: `call_*` around each call, `loop` by difference of whole loops; and what was lost."""
    calls: list[float] = []
    on, off = [], []
    with tempfile.TemporaryDirectory() as directory:
        log = EventLog(directory, role="rollout", job="bench")
        for number in range(rounds):
            log.step = number
            off.append(asyncio.run(_loop(NULL_LOG, requests, turns, [])))
            on.append(asyncio.run(_loop(log, requests, turns, calls)))
            log.flush(60.0)
        refused, failed = sum(writer().refused.values()), writer().failed
        log.close()
    events_a_round = requests * turns * EVENTS_A_TURN
    ordered = sorted(calls)
    return {
        "requests": requests,
        "events": len(calls),
        "call_median_us": round(statistics.median(ordered) * 1e6, 3),
        "call_mean_us": round(statistics.fmean(ordered) * 1e6, 3),
        "call_p99_us": round(ordered[int(0.99 * len(ordered))] * 1e6, 3),
        "loop_us": round((statistics.median(on) - statistics.median(off)) / events_a_round * 1e6, 3),
        "dropped": refused + failed,
    }


async def _loop(log: Any, requests: int, turns: int, calls: list[float]) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(_request(log, number, turns, calls) for number in range(requests)))
    return time.perf_counter() - started


async def _request(log: Any, number: int, turns: int, calls: list[float]) -> None:
    about = {"request_id": f"45bb6a77-b6b2-4ed5-afde-97ccf622cdb0-{number}"}
    for turn in range(1, turns + 1):
        await asyncio.sleep(0)  # all requests take turns in the loop
        for event in (events.TURN_PREPROCESS, events.TURN_ENGINE_CALL, events.TURN_POSTPROCESS, events.TURN_END):
            extra = about | {"turn": turn, "prompt_tokens": 128, "response_tokens": 512, "finish_reason": "stop"}
            began = time.perf_counter()
            log.log(event, 1.25, extra, step=3)
            calls.append(time.perf_counter() - began)


def bench_log(
    requests: Annotated[int, typer.Option(help="Concurrent asyncio requests.", min=1)] = 1024,
    turns: Annotated[int, typer.Option(help="Turns a request; four events each.", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="Loops with the log on, and as many with it off.", min=1)] = 10,
    real: Annotated[bool, typer.Option("--real", help="Train a real job with the log on in every second step.")] = False,
    file: Annotated[Path, typer.Option(help="With --real: the run file; its first job runs.")] = Path("examples/demo.yaml"),
    directory: Annotated[Path, typer.Option("--dir", help="With --real: where the run goes.")] = Path("runs/bench_log"),
    steps: Annotated[int, typer.Option(help="With --real: steps, half of them with the log on; two are left out.")] = 42,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what an event costs its caller; with --real, what the log costs a step."""
    from bench.log_cost_in_run import measure_run

    found = measure(requests, turns, rounds)
    if real:
        found["real"] = measure_run(file, directory, steps)
    if json:
        return print(json_module.dumps(found))
    print("an event: {call_median_us:.1f} us at the median, {call_p99_us:.1f} us at p99, {dropped} dropped".format(**found))
    if real:
        line = (
            "{}: {off_s:.3f} s without the log, {on_s:.3f} s with it: {overhead_percent:+.2f} %"
            " (95 %: {interval_percent[0]:+.2f} to {interval_percent[1]:+.2f})"
        )
        print(line.format("a step", **found["real"]))
        print(
            "of which the log's own work: {lines:.0f} lines, {cost_s:.4f} s, {percent_of_step:.3f} %".format(
                **found["real"]["own_cost"]
            )
        )
        print(line.format("its processor time", **found["real"]["processor"]))
        print(line.format("of which the engine's schedulers", **found["real"]["engine"]))
        print(line.format("for 1,000 tokens", **found["real"]["engine"]["per_1000_tokens"]))
        line = (
            "of which the processes that log: {off_s:.3f} s without, {on_s:.3f} s with it, {percent_of_step:+.2f} % of the step"
        )
        print(line.format(**found["real"]["logging_processes"]))
