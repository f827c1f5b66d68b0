"""A real job whose rollouts grow onto a node that another one asks for 200 times, at any moment: how fast is it given back, and
does any response change?

    python -m tests.e2e.growing FOLDER [REQUESTS]

By hand; some twelve minutes. Two runs, decoding greedily with weights that stay as they are: one owns the first of two nodes
and grows onto the second, one has both, undisturbed. Prints one JSON object; exit code 1: a response changed or is missing, a
step was lost, the node never was lent, or it came back later than three seconds in more than one of a hundred cases.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path

from tests.e2e import tiny
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.profiling.eventlog import events

STEPS, REQUESTS, PAUSE_S, HELD_S = 40, 200, (0.0, 1.5), 0.3
SLOW_S = 3.0
_LIMIT_S = 1500.0
_ROLLOUT = "actor_rollout_ref.rollout"
_JOB = [
    f"{_ROLLOUT}.n_gpus_per_node=1",
    f"{_ROLLOUT}.nnodes=2",
    "++ray_kwargs.ray_init.num_gpus=3",
    f"{_ROLLOUT}.n=2",
    f"{_ROLLOUT}.top_k=1",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "data.max_response_length=384",
    "actor_rollout_ref.actor.optim.lr=0.0",
    "actor_rollout_ref.actor.optim.weight_decay=0.0",
    tiny.at_once(8),
    "mux.seeded_sampling=false",
    "mux.profile.texts=1.0",
]
_BOTH = "mux.nodes.rollout=[r0, r1]"
_GROWS = ["mux.rollout.growth={own: [r0]}"]
_NODES = {"rollout": ["r0", "r1"], "train": ["t0", "t1"]}


class Owner:
    """Asks for the node that is lent, at random moments while `there` says that it is."""

    def __init__(self, address: str, requests: int) -> None:
        self.waited: list[float] = []
        self._mux = connect(address, "owner", {"rollout": ["r1"], "train": ["t1"]}, uid="owner:1")
        self._requests, self._draw = requests, random.Random(7)

    def run(self, is_lent, is_over) -> None:
        step = 0
        while step < self._requests and not is_over():
            time.sleep(self._draw.uniform(*PAUSE_S))
            while not is_lent() and not is_over():
                time.sleep(0.01)
            step += 1
            began = time.perf_counter()
            with self._mux.phase("rollout", step=step):
                self.waited.append(time.perf_counter() - began)
                time.sleep(HELD_S)
        self._mux.close()


def main() -> None:
    folder, requests = Path(sys.argv[1]).absolute(), int(sys.argv[2]) if len(sys.argv) > 2 else REQUESTS
    keys = [*tiny.overrides(tiny.assets_in(folder), STEPS), *_JOB]
    waited = disturbed(folder, keys, requests)
    undisturbed(folder, keys)
    found = told(folder, waited)
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["wrong"]))


def undisturbed(folder: Path, keys: list[str]) -> None:
    code = tiny.start_job("alone", keys, folder / "alone", None, _BOTH).wait(_LIMIT_S)
    if code:
        sys.exit(f"the job alone ended with {code}")


def disturbed(folder: Path, keys: list[str], requests: int) -> list[float]:
    pools = {side: {"nodes": [{"name": name} for name in names]} for side, names in _NODES.items()}
    with Coordinator(make_config({"pools": pools})) as coordinator:
        process = tiny.start_job("grows", keys, folder / "grows", coordinator.address, _BOTH, *_GROWS)
        owner = Owner(coordinator.address, requests)

        def is_lent() -> bool:
            holders = coordinator.snapshot()["pools"]["rollout"]["nodes"]["r1"]["holders"]
            return any(holder.get("filler") for holder in holders)

        asking = threading.Thread(target=owner.run, args=(is_lent, lambda: process.poll() is not None))
        asking.start()
        code = process.wait(_LIMIT_S)
        asking.join()
    if code:
        sys.exit(f"the job that grows ended with {code}: {(folder / 'grows' / 'grows' / 'job.log').read_text()[-3000:]}")
    return owner.waited


def told(folder: Path, waited: list[float]) -> dict:
    logs = {name: tiny.events(folder / name, name) for name in ("grows", "alone")}
    steps = {name: sum(event["event"] == events.STEP for event in log) for name, log in logs.items()}
    grown = [event for event in logs["grows"] if event["event"] == events.GROWTH]
    moved = [event for event in tiny.events(folder / "grows", "grows", "rollout") if event["event"] == events.REQUEST_MIGRATED]
    texts = {name: responses(folder / name, name) for name in logs}
    changed = sum(texts["grows"].get(prompt) != text for prompt, text in texts["alone"].items())
    waited = sorted(waited)
    slow = sum(it > SLOW_S for it in waited)
    wrong = [f"{changed} of {len(texts['alone'])} prompts have other responses"] if changed else []
    wrong += [f"steps: {steps}"] if set(steps.values()) != {STEPS} else []
    wrong += [] if grown else ["the node was never lent"]
    wrong += [f"{slow} of {len(waited)} requests waited longer than 3 s"] if slow > len(waited) / 100 else []
    return {
        "requests": len(waited),
        "given_back_median_s": round(statistics.median(waited), 3),
        "given_back_p99_s": round(waited[min(len(waited) - 1, int(0.99 * len(waited)))], 3),
        "given_back_most_s": round(waited[-1], 3),
        "lent": len(grown),
        "lent_s": round(sum(event["duration_sec"] for event in grown), 1),
        "left_with_requests": sum(event["extra"]["requests"] > 0 for event in grown),
        "stays_moved": len(moved),
        "tokens_moved": sum(event["extra"]["tokens"] for event in moved),
        "prompts": len(texts["alone"]),
        "wrong": wrong,
    }


def responses(directory: Path, job: str) -> dict[str, list[str]]:
    """By prompt, each different one. Weights do not change, so no prompt has two."""
    found: dict[str, set[str]] = {}
    for event in tiny.events(directory, job, "rollout"):
        if event["event"] == events.REQUEST_TEXT:
            found.setdefault(event["extra"]["prompt"], set()).add(event["extra"]["response"])
    return {prompt: sorted(texts) for prompt, texts in found.items()}


if __name__ == "__main__":
    main()
