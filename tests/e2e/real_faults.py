"""A real job with a fault on purpose: does the report name it?

python -m tests.e2e.real_faults FOLDER replica|stall|tool: trains the tests' small model for some minutes, prints what `verl-mux
report` finds in its log as JSON, and ends with 1 where anything is missing or too much.

- replica: two engines; the scheduler of the second is stopped for 60 ms of each 100 in steps 9 to 12
- stall: the same two; it is stopped for 14 s in steps 5, 8 and 10
- tool: answers of two turns; the tool between them takes 4 s instead of 0.05 in steps 9 to 11 (slow_tool.py)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.e2e import slow_tool, tiny
from verl_mux.rollout.engine.record import engines

JOB, NODE, FAULTY = "job", "r0", 1
SLOW_STEPS, STALL_STEPS = range(9, 13), (5, 8, 10)
STOPPED_S, RUNNING_S, STALL_S = 0.06, 0.04, 14.0
_LIMIT_S, _LOOK_S = 900.0, 0.05
_ROLLOUT = "actor_rollout_ref.rollout"
_TWO_ENGINES = [
    f"{_ROLLOUT}.n_gpus_per_node=2",
    "++ray_kwargs.ray_init.num_gpus=3",
    f"{_ROLLOUT}.n=8",
    "data.max_response_length=192",
]
TOOL = [
    "data.return_raw_chat=True",
    "data.max_response_length=128",
    f"{_ROLLOUT}.agent.default_agent_loop=tool_agent",
    f"{_ROLLOUT}.multi_turn.enable=True",
    f"{_ROLLOUT}.multi_turn.format=every_answer",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns=2",
    f"{_ROLLOUT}.multi_turn.function_tool_path={Path(slow_tool.__file__).absolute()}",
]


@dataclass(frozen=True)
class Expected:
    """A finding that there has to be once. steps: of which its own has to be one. seconds: how long it may say that it took."""

    kind: str
    steps: Collection[int]
    replica: int | None = None
    node: str | None = None
    seconds: tuple[float, float] = (0.0, float("inf"))

    def is_named_by(self, finding: dict[str, Any]) -> bool:
        where = (finding["kind"], finding["replica"], finding["node"]) == (self.kind, self.replica, self.node)
        return where and finding["step"] in self.steps and self.seconds[0] <= finding["seconds"] <= self.seconds[1]


def main() -> None:
    folder, kind = Path(sys.argv[1]).absolute(), sys.argv[2]
    keys, steps, do, expected = KINDS[kind]
    run(folder, [*tiny.overrides(tiny.assets_in(folder), steps), *keys], do)
    findings = report(folder)
    wrong = differences(findings, expected)
    print(json.dumps({"fault": kind, "named": not wrong, "wrong": wrong, "findings": findings}, indent=1))
    sys.exit(bool(wrong))


def differences(findings: list[dict[str, Any]], expected: list[Expected]) -> list[str]:
    """What is missing and what is too much, a line each."""
    left, missing = list(findings), []
    for one in expected:
        named = next((finding for finding in left if one.is_named_by(finding)), None)
        if named is None:
            missing.append(f"not found: {one}")
        else:
            left.remove(named)
    return missing + [f"too much: {finding['kind']} of step {finding['step']}: {finding['text']}" for finding in left]


def run(folder: Path, keys: list[str], do: Callable[[Path, subprocess.Popen], None]) -> None:
    """Trains; `do` does harm meanwhile."""
    process = tiny.start_job(JOB, keys, folder, None)
    try:
        do(folder, process)
        code = process.wait(_LIMIT_S)
    finally:
        process.kill()
    if code:
        sys.exit(f"the job ended with {code}: {(folder / JOB / 'job.log').read_text()[-3000:]}")


def report(folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "verl_mux", "report", str(folder / JOB / "events"), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["findings"]


def slow_down(folder: Path, process: subprocess.Popen) -> None:
    _until(lambda: _over(folder, SLOW_STEPS[0] - 1), process)
    with _stopping(_scheduler(folder)) as scheduler:
        while not _over(folder, SLOW_STEPS[-1]) and process.poll() is None:
            scheduler.suspend()
            time.sleep(STOPPED_S)
            scheduler.resume()
            time.sleep(RUNNING_S)


def stall(folder: Path, process: subprocess.Popen) -> None:
    for step in STALL_STEPS:
        _until(lambda step=step: _works_on(folder, step), process)
        with _stopping(_scheduler(folder)) as scheduler:
            scheduler.suspend()
            time.sleep(STALL_S)


def _nothing(folder: Path, process: subprocess.Popen) -> None:
    """The tool knows by itself when to be slow."""


@contextlib.contextmanager
def _stopping(process: psutil.Process) -> Iterator[psutil.Process]:
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGCONT)


def _scheduler(folder: Path) -> psutil.Process:
    """Of the faulty replica: every process that logs says who it is; a scheduler that does not is a child of one."""
    opened = [e for e in tiny.events(folder, JOB, "server") if e["event"] == "log_open" and e["workid"] == FAULTY]
    found = [psutil.Process(event["extra"]["pid"]) for event in opened]
    title = engines()[tiny.ENGINE].scheduler_title
    for process in (*found, *(child for it in found for child in it.children(recursive=True))):
        if " ".join(process.cmdline()).startswith(title):
            return process
    raise AssertionError(f"no scheduler of replica {FAULTY} among {found}")


def _over(folder: Path, step: int) -> bool:
    return '"event":"step"' in _log(folder, "trainer", step, 0)


def _works_on(folder: Path, step: int) -> bool:
    return '"event":"engine_queue"' in _log(folder, "server", step, FAULTY)


def _log(folder: Path, role: str, step: int, worker: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        return (folder / JOB / "events" / role / f"step_{step}" / f"worker_{worker}.jsonl").read_text()
    return ""


def _until(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError("the job ended, or took too long, before the fault")
        time.sleep(_LOOK_S)


KINDS: dict[str, tuple[list[str], int, Callable[[Path, subprocess.Popen], None], list[Expected]]] = {
    "replica": (_TWO_ENGINES, 14, slow_down, [Expected("straggler", SLOW_STEPS, FAULTY, NODE)]),
    "stall": (
        _TWO_ENGINES,
        12,
        stall,
        [Expected("silent_gap", [step], FAULTY, NODE, (STALL_S - 1.5, STALL_S + 1.5)) for step in STALL_STEPS],
    ),
    "tool": (TOOL, 14, _nothing, [Expected("tool_wait", slow_tool.STEPS)]),
}


if __name__ == "__main__":
    main()
