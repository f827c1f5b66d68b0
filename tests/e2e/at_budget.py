"""Two whole jobs on nodes whose devices have what their certificate says, then a tenth less.

`python -m tests.e2e.at_budget FOLDER [STEPS]` (a quarter of an hour, by hand): the demo's models, steps with short answers. The
budget is the most that `verl-mux plan --memory` counts on a node; JSON on stdout, with what each job's tags measured beside what
was certified.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from tests.e2e import tiny
from verl_mux.launcher.plan_memory import certificate_of
from verl_mux.memory.certificate.certify import Certificate
from verl_mux.platform.charges import SCALE_VARIABLE
from verl_mux_cpu import device_ledger

_EXAMPLES = Path(__file__).parents[2] / "examples"
_LIMIT_S = 1200
_LOOK_S = 0.05
# The ledger sees no activations, so they are kept few; and tensors outweigh what is charged.
_OVERRIDES = [
    "data.max_response_length=64",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.95",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.chunked_prefill_size=128",
]
# Kinds that a run measures, by side and phase.
_MEASURED = {("r", "rollout"): ("weights", "kv_cache"), ("t", "train"): ("weights", "optimizer")}


def main() -> None:
    folder, steps = Path(sys.argv[1]).absolute(), int(sys.argv[2]) if len(sys.argv) > 2 else 20
    os.environ[SCALE_VARIABLE] = "0.01"
    needed = max(phase.total for gpu in certificate(folder / "sizes", steps, None).gpus.values() for phase in gpu.phases.values())
    told = {}
    for name, budget in {"certificate": needed, "a_tenth_less": int(0.9 * needed)}.items():
        home = folder / name
        found = certificate(home, steps, budget)
        told[name] = {"budget": budget, "fits": found.fits, "why_not": found.why_not, **run(home, steps)}
    print(json.dumps({**told, "measured_over_certified": measured(folder / "certificate")}, indent=1))


def certificate(home: Path, steps: int, budget: int | None) -> Certificate:
    """Of both jobs; also writes their run file, and one of each job for itself."""
    home.mkdir(parents=True, exist_ok=True)
    spec = _spec(home, steps, budget)
    _write(home / "run.yaml", spec)
    for name, job in spec["jobs"].items():
        _write(home / f"{name}.yaml", {**spec, "jobs": {name: job}})
    return certificate_of([home / "run.yaml"], None, None)


def _spec(home: Path, steps: int, budget: int | None) -> dict[str, Any]:
    """The demo, its two jobs at once from the start."""
    text = (_EXAMPLES / "demo.yaml").read_text()
    spec = yaml.safe_load(text.replace("{here}", str(_EXAMPLES)).replace("{dir}/assets", str(home.parent / "assets")))
    del spec["coordinator"]["schedule"]
    of_device = [] if budget is None else [f"mux.device.budget={budget / 1e9}"]
    spec["overrides"] += [*_OVERRIDES, *of_device, f"trainer.total_training_steps={steps}"]
    spec["environment"] |= {device_ledger.DIRECTORY_VARIABLE: str(home / "devices"), SCALE_VARIABLE: os.environ[SCALE_VARIABLE]}
    return {**spec, "dir": str(home / "run")}


def _write(path: Path, spec: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(spec, sort_keys=False))


def run(home: Path, steps: int) -> dict[str, Any]:
    """Exit code of the run, steps of each job, what a job's log ends with, and the most that each node's device held."""
    os.environ[device_ledger.DIRECTORY_VARIABLE] = str(home / "devices")
    over, peaks = threading.Event(), Counter()
    looking = threading.Thread(target=_look, args=(over, peaks))
    looking.start()
    try:
        with (home / "run.log").open("w") as log:
            command = [sys.executable, "-m", "verl_mux", "run", str(home / "run.yaml")]
            done = subprocess.run(command, stdout=log, stderr=log, timeout=_LIMIT_S, check=False)
    finally:
        over.set()
        looking.join()
    jobs = list(yaml.safe_load((home / "run.yaml").read_text())["jobs"])
    return {
        "exit_code": done.returncode,
        "steps": {job: sum(event["event"] == "step" for event in tiny.events(home / "run", job)) for job in jobs},
        "said": {job: _no_room(home / "run" / job / "job.log") for job in jobs},
        "peak": dict(peaks),
    }


def _look(over: threading.Event, peaks: Counter[str]) -> None:
    """An awake job holds what it has for longer than a look takes."""
    while not over.wait(_LOOK_S):
        held: Counter[str] = Counter()
        for _, account in device_ledger.accounts():
            held[account.node] += account.total if account.lives else 0
        for node, num_bytes in held.items():
            peaks[node] = max(peaks[node], num_bytes)


def _no_room(log: Path) -> str:
    """The last line that tells of no room; "" where none does."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if "held by" in line), "")


def measured(home: Path) -> dict[str, dict[str, float]]:
    """By job and kind: bytes that the run's event log measured over those of the certificate."""
    told: dict[str, dict[str, float]] = {}
    for name in yaml.safe_load((home / "run.yaml").read_text())["jobs"]:
        certified = certificate_of([home / f"{name}.yaml"], None, None)
        observed = certificate_of([home / f"{name}.yaml"], None, home / "run")
        told[name] = {
            f"{phase} {kind}": observed.gpus[node].phases[phase].bytes[kind] / certified.gpus[node].phases[phase].bytes[kind]
            for node in certified.gpus
            for (side, phase), kinds in _MEASURED.items()
            for kind in kinds
            if node.startswith(side)
        }
    return told


if __name__ == "__main__":
    main()
