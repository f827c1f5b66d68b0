"""What the event log costs a step of a real job.

One job of a run file trains alone, with the log on in even steps and off in odd ones (`mux.profile.every=2`) and all answers of
one length, so that all steps have the same work. A step's seconds are those from the coordinator's word of one step's end to
the next; the coordinator's own log is on throughout.
"""

from __future__ import annotations

import json
import random
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.errors import Failure, UserError
from verl_mux.profiling import events

WARM_UP = 2  # steps left out: caches and allocators still grow in them
DRAWS = 2000


def measure_run(file: Path, directory: Path, steps: int) -> dict[str, Any]:
    """Trains `steps` steps of the run file's first job and compares them, see `compare_steps`."""
    from verl_mux.launcher import run_file
    from verl_mux.launcher.command import run_jobs

    if steps < 8:
        raise UserError(f"--steps is {steps}; at least 8 are needed")
    run = _alone(run_file.read(file, directory), steps)
    run_jobs(run)
    return compare_steps(step_seconds(Path(run.dir) / "coordinator" / "events"))


def _alone(run: Any, steps: int) -> Any:
    """The run file's first job by itself, all answers as long as they may be."""
    overrides = [
        *run.overrides,
        f"trainer.total_training_steps={steps}",
        "mux.profile.every=2",
        "actor_rollout_ref.rollout.ignore_eos=True",
    ]
    name, job = next(iter(run.jobs.items()))
    settings = {key: value for key, value in run.coordinator.items() if key not in ("schedule", "expect_jobs")}
    prepare = [command for command in run.prepare if "--job" not in command or name in command]
    return msgspec.structs.replace(run, coordinator=settings, jobs={name: job}, overrides=overrides, prepare=prepare)


def step_seconds(directory: Path) -> dict[int, float]:
    """Seconds of each step from a coordinator's event log of one job. The first step has none."""
    ends = {}
    for path in directory.rglob("*.jsonl"):
        for line in map(json.loads, path.open()):
            if line["event"] == events.STEP_REPORT:
                ends[line["step"]] = datetime.fromisoformat(line["timestamp"]).timestamp()
    return {step: ends[step] - ends[step - 1] for step in sorted(ends) if step - 1 in ends}


def compare_steps(seconds: dict[int, float]) -> dict[str, Any]:
    """Even steps (on) against odd ones (off), from medians.

    `noise_percent`: half the width of the bootstrap's 95 % interval of `overhead_percent`.
    """
    on = [value for step, value in seconds.items() if step > WARM_UP and step % 2 == 0]
    off = [value for step, value in seconds.items() if step > WARM_UP and step % 2]
    if min(len(on), len(off)) < 2:
        raise Failure(f"{len(on)} steps with the log and {len(off)} without were told: too few to compare")
    rng = random.Random(0)
    drawn = sorted(_percent(rng.choices(on, k=len(on)), rng.choices(off, k=len(off))) for _ in range(DRAWS))
    return {
        "steps_on": len(on),
        "steps_off": len(off),
        "on_s": round(statistics.median(on), 4),
        "off_s": round(statistics.median(off), 4),
        "overhead_percent": round(_percent(on, off), 3),
        "noise_percent": round((drawn[int(0.975 * DRAWS)] - drawn[int(0.025 * DRAWS)]) / 2, 3),
    }


def _percent(on: list[float], off: list[float]) -> float:
    return 100 * (statistics.median(on) / statistics.median(off) - 1)
