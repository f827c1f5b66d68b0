"""Two real jobs on the bed's hosts, and what happens to them: `python -m tests.hosts.faults FOLDER [FAULT...]` prints JSON.

The coordinator runs in a PID namespace of its own, so that it sees nothing of the hosts but what their agents say. `wide` trains
on two hosts and generates on two, `narrow` on one each; both are small, and are started again when they fail. A driver and an
engine are `narrow`'s, met while `wide` waits for what it holds. A rank is one of `wide`'s two, met in training; a host that is
cut off, or gone, then too, one that only `wide` uses. There `narrow` hardly ever waits: it generates longer than `wide` trains.

By fault: `delay_s`, from the fault, or the request if that came later, to the next lease of the other job on a node that was
held; `asked_s`, from the fault to that request (below 0: it waited already); `back_s`, to the first step of who was met after it
came back; `resumed`: that step is the one after its newest checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import yaml

from tests.e2e import tiny
from tests.hosts.conftest import EXAMPLE, HOSTS, SMALL_RAY, Bed, with_clusters
from verl_mux.coordinator.commands import fetch_status
from verl_mux.launcher.marked_process import read_note
from verl_mux.profiling.plain.lines import read_directory

NAME, SUBNET = "muxfault", "10.79.0"
STEPS, LIMIT_S, CUT_S, BLINK_S = 100_000, 600.0, 45.0, 8.0
# A log is opened by its first line, which tells of a look that was shortly before. No agent is back so soon after it was killed.
OPENED_AFTER_S = 1.0
FAULTS = ("driver", "engine", "rank", "agent", "blink", "coordinator", "cut", "gone")


class World:
    def __init__(self, folder: Path, bed: Bed) -> None:
        self.bed, self.folder, self.out = bed, folder, folder / "run"
        self.address = f"tcp://{bed.address}:5570"
        self._coordinator: subprocess.Popen | None = None
        self._launcher: subprocess.Popen | None = None

    def begin(self) -> None:
        tiny.make_assets(self.folder / "assets")
        example = yaml.safe_load((EXAMPLE.parent / "hosts.yaml").read_text())
        (self.folder / "pools.yaml").write_text(yaml.safe_dump({**example["coordinator"], "expect_jobs": 2}))
        subprocess.run([sys.executable, "-m", "verl_mux", "keys", str(self.folder / "keys")], check=True)
        self.start_coordinator()
        resuming = ["trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2", "trainer.resume_mode=auto", "data.shuffle=False"]
        jobs = {name: {**job, "restarts": 100} for name, job in example["jobs"].items()}
        for name, job in jobs.items():
            both = [key for key in job["overrides"] if "nnodes" in key]
            slow = f"reward.custom_reward_function.path={self.folder}/assets/slow_reward.py"
            # Two ranks divide it, and a rollout is long enough to be met in it.
            sizes = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.max_response_length=128"]
            keys = [word for word in tiny.overrides(self.folder / "assets", STEPS) if "ray_init" not in word]
            job["overrides"] = [*keys, *resuming, *both, *sizes, "mux.launch.warm=false"]
            job["overrides"] += [slow] if name == "wide" else []
        run = {"dir": str(self.out), "coordinator": self.address, "keys": str(self.folder / "keys"), "jobs": jobs}
        file = self.folder / "run.yaml"
        file.write_text(yaml.safe_dump({**run, "environment": example["environment"]}))
        run_it = [sys.executable, "-m", "verl_mux", "run", str(file), "--submit", f"http://{self.bed.address}:20002"]
        command = with_clusters(file, NAME, run_it, "--pools", str(self.folder / "pools.yaml"), *SMALL_RAY)
        log = (self.folder / "launcher.log").open("a")
        self._launcher = subprocess.Popen(command, stdout=log, stderr=log)
        for job in jobs:
            self.until(lambda job=job: len(self.steps(job)) >= 2, f"{job} does two steps", 2 * LIMIT_S)

    def start_coordinator(self) -> None:
        words = [sys.executable, "-m", "verl_mux", "coordinator", "--bind", self.address, "--config", self.folder / "pools.yaml"]
        words += ["--journal", self.folder / "journal", "--keys", self.folder / "keys", "--log-dir", self.folder / "coordinator"]
        alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        log = (self.folder / "coordinator.log").open("a")
        self._coordinator = subprocess.Popen([*alone, *map(str, words)], stdout=log, stderr=log)
        self.until(lambda: self.status() is not None, "the coordinator answers", 30.0)

    def end(self) -> None:
        for process in (self._launcher, self._coordinator):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT if process is self._launcher else signal.SIGKILL)
                process.wait(120)

    # --- what is seen ---

    def until(self, condition: Callable[[], object], what: str, seconds: float = LIMIT_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or (self._launcher is not None and self._launcher.poll() is not None):
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            time.sleep(0.1)

    def status(self) -> dict | None:
        try:
            return fetch_status(self.address, 2.0, self.folder / "keys")
        except Exception:
            return None

    def holds(self, job: str, phase: str, contended: bool = False) -> bool:
        """Whether the job is in such a phase, and, with `contended`, another job waits for one of its nodes."""
        status = self.status() or {"pools": {}}
        nodes = [node for pool in status["pools"].values() for node in pool["nodes"].values()]
        mine = [node for node in nodes for holder in node["holders"] if (holder["job"], holder["phase"]) == (job, phase)]
        return bool(mine) and (not contended or any(each["job"] != job for node in mine for each in node["queue"]))

    def held_nodes(self, job: str) -> list[str]:
        nodes = {name: node for pool in self.status()["pools"].values() for name, node in pool["nodes"].items()}
        return [name for name, node in nodes.items() if any(holder["job"] == job for holder in node["holders"])]

    def steps(self, job: str) -> list[tuple[float, int]]:
        """When each step ended (epoch seconds), in order."""
        done = [e for e in tiny.events(self.out, job) if e["event"] == "step"] if (self.out / job / "events").exists() else []
        return sorted((tiny.ended(e), e["step"]) for e in done)

    def checkpoint(self, job: str) -> int:
        latest = self.out / job / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(latest.read_text()) if latest.exists() else 0

    def grants(self, job: str) -> list[tuple[float, float, list[str]]]:
        """When each lease was granted and asked for, and its nodes."""
        waits = [line for line in read_directory(self.folder / "coordinator") if line.event == "lease_wait"]
        mine = [line for line in waits if line.extra["job"] == job]
        return sorted((line.end, line.end - (line.duration_sec or 0.0), line.extra["nodes"]) for line in mine)

    def processes(self, job: str, *words: str) -> list[psutil.Process]:
        """Of the job, on its hosts, whose command line or title has one of these words."""
        mark = f"VERL_MUX_JOB_UID={read_note(self.out / job).uid}".encode()
        found = []
        for process in psutil.process_iter():
            try:
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    title = " ".join(process.cmdline())
                    follows = "verl_mux.warm.submitted" in title  # the driver, for the launcher
                    found += [process] if any(word in title for word in words) and not follows else []
            except (OSError, psutil.Error):
                continue
        return found


# --- faults: each returns what was measured ---


def _kill_in(world: World, met: str, other: str, phase: str, words: tuple[str, ...], one: bool = False) -> dict:
    world.until(lambda: world.holds(met, phase, contended=phase == "rollout"), f"{met} is in its {phase}")
    held, last = world.held_nodes(met), world.checkpoint(met)
    found = world.processes(met, *words)
    if not found:
        titles = sorted({" ".join(process.cmdline())[:80] for process in world.processes(met, "")})
        raise LookupError(f"no process of {met} has {words}; there are {titles}")
    chosen = [random.choice(found)] if one else found
    titles = [" ".join(process.cmdline())[:80] for process in chosen]
    at = time.time()
    for process in chosen:
        process.kill()
    return {"killed": titles, "of": len(found), **_after(world, met, other, at, held, last)}


def _after(world: World, met: str, other: str, at: float, held: list[str], last: int) -> dict:
    granted, seconds = _next_lease(world, other, at, held)
    world.until(
        lambda: [step for step in world.steps(met) if step[0] > granted and step[1] > last], f"{met} is back", 2 * LIMIT_S
    )
    back, step = next(step for step in world.steps(met) if step[0] > granted and step[1] > last)
    return {
        **seconds,
        "nodes": held,
        "back_s": round(back - at, 1),
        "checkpoint": last,
        "first_step": step,
        "resumed": step in (last + 1, last + 2),
    }


def _next_lease(world: World, job: str, at: float, held: list[str]) -> tuple[float, dict[str, float]]:
    """When the job was granted a lease on one of these nodes after `at`, and from the fault to that."""

    def grants() -> list[tuple[float, float, list[str]]]:
        return [grant for grant in world.grants(job) if grant[0] > at and not set(grant[2]).isdisjoint(held)]

    world.until(grants, f"{job} gets what was held")
    granted, asked, _ = grants()[0]
    return granted, {"delay_s": round(granted - max(at, asked), 2), "asked_s": round(asked - at, 2)}


def _unharmed(world: World, at: float, seconds: float) -> dict:
    """A fault that harms no job: both go on, and lose no step."""
    before = {job: [when for when, _ in world.steps(job) if when < at][-10:] for job in ("wide", "narrow")}
    periods = {job: max(b - a for a, b in pairwise(ended)) for job, ended in before.items()}
    out = {}
    for job in before:
        world.until(lambda job=job: len([1 for when, _ in world.steps(job) if when > at + seconds]) >= 2, f"{job} goes on")
        ended = [when for when, _ in world.steps(job) if when > at - periods[job]]
        numbers = [step for _, step in world.steps(job)][-8:]
        gap = max((b - a for a, b in pairwise(sorted({*before[job][-1:], *ended}))), default=0.0)
        out[job] = {
            "longest_step_before_s": round(periods[job], 1),
            "longest_gap_after_s": round(gap, 1),
            "no_step_lost": numbers == list(range(numbers[0], numbers[0] + len(numbers))),
        }
    return out


def driver(world: World) -> dict:
    return _kill_in(world, "narrow", "wide", "rollout", ("main_ppo",))


def engine(world: World) -> dict:
    return _kill_in(world, "narrow", "wide", "rollout", ("sglang::scheduler",))


def rank(world: World) -> dict:
    return _kill_in(world, "wide", "narrow", "train", ("WorkerDict", "TrainingWorker", "ActorRollout"), one=True)


def agent(world: World) -> dict:
    at, host = time.time(), random.choice(HOSTS)
    pids = [process.pid for process in psutil.process_iter() if _is_agent(process) and _on_host(world, process, host)]
    if not pids:
        raise LookupError(f"no agent runs on {host}")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return {"host": host, "killed": len(pids), **_unharmed(world, at, 10.0)}


def _is_agent(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[1:4] == ["-m", "verl_mux", "agent"]
    except psutil.Error:
        return False


def _on_host(world: World, process: psutil.Process, host: str) -> bool:
    return os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink(f"/proc/{world.bed.hosts()[host].pid}/ns/net")


def blink(world: World) -> dict:
    """A cable out for less than the lease."""
    at, host = time.time(), random.choice(HOSTS)
    world.bed.link(host, up=False)
    time.sleep(BLINK_S)
    world.bed.link(host, up=True)
    return {"host": host, "seconds": BLINK_S, **_unharmed(world, at, BLINK_S)}


def coordinator(world: World) -> dict:
    at = time.time()
    world._coordinator.kill()
    world._coordinator.wait()
    world.start_coordinator()
    return {"listening_again_s": round(time.time() - at, 2), **_unharmed(world, at, 5.0)}


def cut(world: World) -> dict:
    """A cable out for longer than the lease, of a host that only `wide` uses."""
    world.until(lambda: world.holds("wide", "train"), "wide trains")
    held, last, at = world.held_nodes("wide"), world.checkpoint("wide"), time.time()
    world.bed.link("hostc", up=False)
    time.sleep(CUT_S)
    world.bed.link("hostc", up=True)
    return {"host": "hostc", "seconds": CUT_S, **_after(world, "wide", "narrow", at, held, last)}


def gone(world: World) -> dict:
    """A host that is no more. `wide` does not come back: its node is not there."""
    world.until(lambda: world.holds("wide", "train"), "wide trains")
    held, at = world.held_nodes("wide"), time.time()
    os.kill(world.bed.hosts()["hostc"].pid, signal.SIGKILL)
    _, seconds = _next_lease(world, "narrow", at, held)
    fenced = {name: node["fenced"] for pool in world.status()["pools"].values() for name, node in pool["nodes"].items()}
    return {"host": "hostc", **seconds, "fenced": fenced}


def two_holders(out: Path) -> list[dict]:
    """By the agents' own logs: spans in which two jobs held device memory on one node. A host has one agent, a node one host."""
    return [span for folder in out.glob("agents/*") for span in _two_on_a_node(folder)]


def _two_on_a_node(folder: Path) -> list[dict]:
    sizes: dict[tuple[str, str], dict[int, int]] = {}
    open_since: dict[str, tuple[float, list[str]]] = {}
    found: list[dict] = []
    for line in sorted(read_directory(folder), key=lambda line: line.end - (OPENED_AFTER_S if line.event == "log_open" else 0.0)):
        if line.event == "log_open":  # An agent that was started again tells what it sees; what the last one saw may be gone.
            sizes.clear()
            open_since.clear()
        if line.event != "device_memory":
            continue
        node, job = line.extra["node"], line.extra["job"]
        sizes.setdefault((node, job), {})[line.extra["pid"]] = line.extra["bytes"]
        now = [other for (where, other), pids in sizes.items() if where == node and any(pids.values())]
        before = open_since.pop(node, None)
        if before and len(before[1]) > 1:
            found.append({"node": node, "jobs": before[1], "seconds": round(line.end - before[0], 3), "at": before[0]})
        if len(now) > 1:
            open_since[node] = (line.end, now)
    return found


def mapped_without_lease(out: Path, coordinator: Path) -> list[dict]:
    """By the agents' own logs: memory that a process took on a node that the job had no lease on at that look.
    An agent that was just cut off has not heard of the last lease; that one is looked up in the coordinator's log."""
    seen = [line for folder in out.glob("agents/*") for line in read_directory(folder) if line.event == "device_memory"]
    taken = [line for line in seen if line.extra["bytes"] > line.extra["before"] and line.extra["leased_to"] != line.extra["job"]]
    leases = _leases(coordinator)
    return [
        {**line.extra, "at": line.end}
        for line in taken
        if not any(
            job == line.extra["job"] and line.extra["node"] in nodes and granted <= line.end <= ended
            for job, nodes, granted, ended in leases
        )
    ]


def _leases(coordinator: Path) -> list[tuple[str, list[str], float, float]]:
    """Each lease's job and nodes, and when it was granted and ended."""
    lines = list(read_directory(coordinator))
    ended = {line.extra["token"]: line.end for line in lines if line.event == "lease_held"}
    waits = [line for line in lines if line.event == "lease_wait"]
    return [(w.extra["job"], w.extra["nodes"], w.end, ended.get(w.extra["token"], math.inf)) for w in waits]


def main() -> None:
    folder, wanted = Path(sys.argv[1]).absolute(), sys.argv[2:] or list(FAULTS)
    wanted.sort(key="gone".__eq__)  # That host does not come back, so no other fault can follow.
    folder.mkdir(parents=True)
    random.seed(0)
    found: dict[str, list[dict]] = {}
    with Bed(NAME, SUBNET) as bed:
        bed.make(HOSTS, shared=[folder])
        world = World(folder, bed)
        try:
            world.begin()
            for name in wanted:
                try:
                    result = globals()[name](world)
                except (TimeoutError, LookupError) as error:
                    result = {"failed": str(error)}
                print(name, json.dumps(result), file=sys.stderr, flush=True)
                found.setdefault(name, []).append(result)
                if "failed" in result:
                    break
        finally:
            world.end()
    without_lease = mapped_without_lease(world.out, folder / "coordinator")
    print(json.dumps({"faults": found, "two_holders": two_holders(world.out), "without_lease": without_lease}, indent=2))


if __name__ == "__main__":
    main()
