"""`verl-mux run` as a person starts it: a real launcher, coordinator and job processes; only verl's trainer is a stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from verl_mux.coordinator.bus.members import carriers
from verl_mux.launcher.marked_process import read_note

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_verl")
POOLS = {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}
NODES = {"rollout": ["r0"], "train": ["t0"]}
_LIMIT_S = 120.0


class Runs:
    """The folder of one test: its run file, and the launchers started on it."""

    def __init__(self, path: Path) -> None:
        self.file, self.out, self.go = path / "run.yaml", path / "out", path / "go"
        self.started: list[subprocess.Popen] = []

    def write(self, jobs: dict[str, dict], **keys) -> None:
        specs = {name: {"nodes": NODES, **{"overrides": [], **spec}} for name, spec in jobs.items()}
        environment = {"PYTHONPATH": f"{FAKE}:{ROOT}"}
        given = {"dir": str(self.out), "coordinator": {"pools": POOLS}, "environment": environment, "jobs": specs}
        # The stand-in of verl needs nothing that would be worth importing once.
        given = {**given, "overrides": ["mux.launch.warm=false"], **keys}
        self.file.write_text(yaml.safe_dump(given))

    def start(self, *options: str) -> subprocess.Popen:
        words = [sys.executable, "-m", "verl_mux", "run", str(self.file), *options]
        self.started.append(subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT))
        return self.started[-1]

    @staticmethod
    def kill(process: subprocess.Popen) -> None:
        process.kill()
        process.wait()

    def ends(self, process: subprocess.Popen) -> str:
        """Its stderr."""
        return process.communicate(timeout=_LIMIT_S)[1]

    def ends_well(self, process: subprocess.Popen) -> str:
        printed = self.ends(process)
        assert process.returncode == 0, printed
        return printed

    def summary(self) -> dict:
        return json.loads((self.out / "summary.json").read_text())

    def note(self, name: str):
        return read_note(self.out / name)

    def steps(self, job: str) -> list[int]:
        return sorted(said["step"] for said in self.lines(job, "step"))

    def lines(self, job: str, event: str) -> list[dict]:
        """Of this event, in the job's log."""
        lines = [line for path in (self.out / job / "events").rglob("*.jsonl") for line in path.read_text().splitlines()]
        return [said for line in lines if (said := json.loads(line))["event"] == event]

    def until(self, condition) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def until_step(self, job: str, step: int) -> None:
        self.until(lambda: self.step(job) >= step)

    def step(self, job: str) -> int:
        checkpoint = self.out / job / "checkpoints" / "step"
        return int(checkpoint.read_text()) if checkpoint.exists() else 0

    def end_all(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        for note in self.out.glob("*/process.json"):
            for member in carriers(read_note(note.parent).uid):
                psutil.Process(member.pid).kill()
