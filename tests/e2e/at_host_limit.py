"""Two real jobs on hosts with memory for one and a half: one waits, the other saves and leaves for it, and comes back.

    python -m tests.e2e.at_host_limit FOLDER

By hand; some ten minutes, most of them start-up: each job leaves after a step or two. Prints what became of them as one JSON
object; exit code 1: a step was lost or done twice, nobody had to leave, or more was let in than there is room for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.e2e import tiny

STEPS, AFTER_S = 3, 75.0
# What a process on these hosts is taken to need, and the memory of each.
PROCESS_GB, HOST_BYTES = 2.0, 3_000_000_000
JOBS = ("one", "other")


def run(folder: Path) -> int:
    """The exit code of `verl-mux run`."""
    tiny.make_assets(folder)
    kind = {"tflops": 1, "tb_per_s": 1, "process_gb": PROCESS_GB, "usd_per_gpu_hour": 1}
    nodes = {"rollout": {"name": "r0", "cpus": [0]}, "train": {"name": "t0", "cpus": [1]}}
    pools = {side: {"kind": "bed", "nodes": [{**node, "host_bytes": HOST_BYTES}]} for side, node in nodes.items()}
    slowly = [f"reward.custom_reward_function.path={folder}/slow_reward.py", "trainer.save_freq=1000"]
    jobs = {name: [*tiny.overrides(folder, STEPS), *slowly] for name in JOBS}
    keys = {"pools": pools, "placement": {"kinds": {"bed": kind}}, "evict_to_disk_after": AFTER_S}
    file = tiny.run_file(folder / "run.yaml", folder / "out", jobs, {"PYTHONPATH": str(Path.cwd())}, {}, **keys)
    return subprocess.run([sys.executable, "-m", "verl_mux", "run", str(file)], check=False).returncode


def told(folder: Path) -> dict:
    """What the event logs say of it."""
    lines = tiny.events(folder / "out", "coordinator", "coordinator")
    steps = {job: Counter(e["step"] for e in tiny.events(folder / "out", job) if e["event"] == "step") for job in JOBS}
    of = lambda event: [line for line in lines if line["event"] == event]  # noqa: E731
    measured = [line["extra"] for line in of("host_memory")]
    return {
        "steps": {job: sum(count.values()) for job, count in steps.items()},
        "lost": {job: sorted(set(range(1, STEPS + 1)) - set(count)) for job, count in steps.items()},
        "doubled": {job: [step for step, times in count.items() if times > 1] for job, count in steps.items()},
        "evicted": [(line["extra"]["job"], line["extra"]["done"], line["extra"]["saving_s"]) for line in of("evicted_to_disk")],
        "waited_s": [(line["extra"]["job"], line["duration_sec"]) for line in of("room_found")],
        "most_counted": max((line["node_bytes"] for line in measured), default=0),
        "capacity": HOST_BYTES,
    }


def main() -> int:
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    code = run(folder)
    found = told(folder)
    print(json.dumps({"exit_code": code, **found}, indent=1))
    whole = not any(found["lost"].values()) and not any(found["doubled"].values())
    return int(code != 0 or not whole or not found["evicted"] or found["most_counted"] > HOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
