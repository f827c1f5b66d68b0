"""Stands in for verl's trainer: takes its leases and writes its event log and its checkpoints, and trains nothing.

`+steps=N`: how many. `+until=FILE`: it goes on until FILE is there, with no more than that. `+die_in=STEP`: kills itself while it
holds that step's lease, unless it was resumed; `+die_always=STEP`: then too. `+refuse=true`: a key is wrong.
`+phase_s=SECONDS`: what a phase takes; `+profiled_s=SECONDS`: what it says that a phase takes, where the coordinator places it.
`+deaf=FILE`: the first start that finds a checkpoint finds no coordinator; FILE says that it was.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from verl_mux.coordinator.bus.client import connect
from verl_mux.placement.estimator import JobNeeds, Observed, model_size
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.log import EventLog

given = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:] if "=" in word)
given = {key: value.strip("'") for key, value in given.items()}


def main() -> None:
    if "refuse" in given:
        print("verl-mux: unknown key mux.colour", file=sys.stderr)
        sys.exit(2)
    checkpoint = Path(given["trainer.default_local_dir"], "step")
    if "deaf" in given and checkpoint.exists() and not os.path.exists(given["deaf"]):
        Path(given["deaf"]).touch()
        print("verl-mux: no coordinator answers within 30 s", file=sys.stderr)
        sys.exit(2)
    first = int(checkpoint.read_text()) + 1 if checkpoint.exists() and given.get("trainer.resume_mode") == "auto" else 1
    log = EventLog(given["mux.profile.dir"], role="trainer", job=given["mux.job"])
    if "mux.move_note" in given:
        Path(given["mux.move_note"]).unlink(missing_ok=True)
    nodes = {"rollout": ["r0"], "train": ["t0"]}
    placed = about_a_placed_job() if given.get("mux.nodes") == "auto" else {}
    nodes = {side: ["auto"] for side in nodes} if placed else nodes
    mux = connect(given["mux.coordinator"], given["mux.job"], nodes, timeout=60.0, keys=given.get("mux.keys"), **placed)
    with mux.phase("init"):
        pass
    step = first - 1
    while step < int(given.get("steps", 10**9)) and not ("until" in given and os.path.exists(given["until"])):
        step += 1
        dies = given.get("die_in") == str(step) and first == 1
        one_step(mux, log, step, dies=dies or given.get("die_always") == str(step))
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.with_suffix(".half").write_text(str(step))
        checkpoint.with_suffix(".half").replace(checkpoint)
        if mux.move:
            Path(given["mux.move_note"]).touch()
            mux.leave_to_move(mux.move, step, 0.0)
            break
    mux.close()
    log.close()


def about_a_placed_job() -> dict:
    model = model_size({"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1000,
                        "num_attention_heads": 4})  # fmt: skip
    needs = JobNeeds(responses=8, prompt_tokens=16, response_tokens=100, rollout_nodes=1, rollout_gpus=1, train_nodes=1,
                     train_gpus=1, weight_bytes=4, model=model)  # fmt: skip
    said = (float(given["profiled_s"]),) * 3
    about = {"needs": needs, "slo": float(given["mux.slo"]), "profiled": Observed(rollout=said, train=said)}
    return {**about, "movable": "mux.move_note" in given}


def one_step(mux, log: EventLog, step: int, dies: bool) -> None:
    log.step = step
    with log.span(events.STEP, {"reward": 1.0, "tokens": 1}):
        for phase in ("rollout", "train"):
            with mux.phase(phase, step=step) as lease, log.span(events.PHASE, {"phase": phase, "nodes": lease.nodes}):
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(float(given.get("phase_s", 0)))
    log.flush()
    mux.report_step(step, {"reward": 1.0})


print(json.dumps(given))
if __name__ == "__main__":
    main()
