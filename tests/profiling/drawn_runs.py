"""Runs in our own layout, drawn by a seed: engines that batch token by token, and faults of any strength planted in them.

Written from docs/event_log.md. Unlike made_engines.py nothing here is planned: time goes in ticks, engines share their speed
among what runs in them, queue what finds no room in their KV cache, and throw out what they let in too early.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

EPOCH = datetime(2026, 3, 1, 12, 0, 0)
FAULTS = ("slow_replica", "stalled_replica", "slow_tool", "slow_reward", "kv_starvation", "slow_node")
MODES = ("plain", "oversampled", "segmented", "migrated", "multiplexed", "async")
TICK = 0.25


@dataclass
class World:
    """What a seed draws. strength: of the fault, between 0 (barely there) and 1. step, replica, node: where it is."""

    mode: str
    fault: str | None
    seed: int
    strength: float = 0.5
    steps: int = 4
    replicas: int = 4
    nodes: int = 2
    workers: int = 8
    requests: int = 96
    turns: int = 1
    spread: float = 0.3
    step: int = 0
    replica: int = 0
    node: str = ""


@dataclass
class Request:
    name: str
    worker: int
    lengths: list[int]
    tools: list[float]
    reward: float
    born: float = 0.0
    turn: int = 1
    stay: int = 0
    got: int = 0  # tokens of this turn
    context: int = 80
    replica: int | None = None
    state: str = "new"  # new queued running away scoring done parked
    since: float = 0.0
    queued: float = 0.0
    entered: float = 0.0
    let_in: float = 0.0
    stay_got: int = 0
    thrown: int = 0
    parked: float = 0.0
    progress: float = 0.0
    begun: bool = False


@dataclass
class Engine:
    number: int
    node: str
    running: list[Request] = field(default_factory=list)
    queue: list[Request] = field(default_factory=list)
    tokens: float = 0.0
    thrown: int = 0
    told: float = 0.0


def draw(seed: int, mode: str | None = None, fault: str | None = None) -> World:
    """A world: of that mode, with that fault."""
    rng = random.Random(seed)
    world = World(mode or rng.choice(MODES), fault, seed, rng.random())
    world.steps, world.replicas = rng.choice([3, 4, 5]), rng.choice([2, 4, 4, 6])
    world.nodes = rng.choice([2, world.replicas]) if world.replicas > 2 else 2
    world.requests = rng.choice([64, 96, 128, 192])
    world.spread = rng.uniform(0.15, 0.35)
    if fault == "slow_node":
        world.replicas, world.nodes = 6, 3
    if fault == "slow_tool" or (fault is None and rng.random() < 0.3):
        world.turns = rng.choice([2, 3])
    world.step, world.replica = rng.randint(1, world.steps), rng.randrange(world.replicas)
    world.node = f"r{world.replica * world.nodes // world.replicas}"
    return world


class Run:
    """One job of a world, written under `directory`/`name`."""

    def __init__(self, directory: Path, world: World, name: str = "a", offset: float = 0.0) -> None:
        self.world, self.name = world, name
        self.rng = random.Random(f"{world.seed} {name}")
        self.lines: dict[tuple[str, int, int], list[tuple[float, str]]] = defaultdict(list)
        self.directory = directory
        self.engines = [Engine(r, f"r{r * world.nodes // world.replicas}") for r in range(world.replicas)]
        self.now, self.version = offset, 0
        self.left: list[Request] = []
        alike = random.Random(world.seed)  # jobs that take turns are of one kind
        self.token_s, self.usual = alike.uniform(0.015, 0.04), int(alike.uniform(150, 500))
        self.away: list[Request] = []

    # ------------------------------------------------------------ the log

    def log(self, role: str, worker: int, step: int, end: float, event: str, seconds: float | None, **extra) -> None:
        line: dict = {"timestamp": (EPOCH + timedelta(seconds=end)).isoformat(timespec="microseconds"), "event": event}
        if seconds is not None:
            line["duration_sec"] = round(max(seconds, 0.0), 6)
        told = {key: value for key, value in extra.items() if value is not None}
        line |= {"extra": told, "workid": worker, "step": step, "role": role, "job": self.name, "run": "5eed5eed"}
        self.lines[role, worker, step].append((end, json.dumps(line)))

    def of(self, request: Request, step: int, event: str, seconds: float | None, end: float | None = None, **extra) -> None:
        self.log(
            "rollout", request.worker, step, self.now if end is None else end, event, seconds, request_id=request.name, **extra
        )

    def write(self) -> None:
        for (role, worker, step), lines in self.lines.items():
            path = self.directory / self.name / "events" / role / f"step_{step}" / f"worker_{worker}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(text + "\n" for _, text in sorted(lines)))

    # ------------------------------------------------------------ the work

    def new(self, step: int, number: int) -> Request:
        world, rng = self.world, self.rng
        lengths = [max(8, min(int(rng.lognormvariate(0, world.spread) * self.usual), 2 * self.usual)) for _ in range(world.turns)]
        tools = [rng.uniform(0.3, 0.8) for _ in range(world.turns - 1)]
        judged = rng.uniform(0.02, 0.06)
        return Request(f"{step:04x}{number:05x}_0", number % world.workers, lengths, tools, judged)

    def step(self, step: int) -> tuple[float, float]:
        """A step's rollout. When it began and ended."""
        world, began = self.world, self.now
        over = 0.5 if world.mode == "oversampled" else 0.0
        wanted = world.requests
        fresh = [self.new(step, n) for n in range(int(wanted * (1 + over)) - len(self.left))]
        under_way = [*self.left, *fresh]
        self.left, self.budget = [], self.usual // 2 if world.mode == "segmented" else None
        self.spent: dict[str, int] = defaultdict(int)
        for place, request in enumerate(under_way):
            self.launch(step, request, self.engines[place % len(self.engines)])
        for engine in self.engines:
            engine.told, engine.tokens = self.now, 0.0
        self.capacity = self.capacities(step, len(under_way))
        self.done, moved = 0, False
        while not self.over(under_way, wanted):
            self.tick(step, began)
            if world.mode == "migrated" and not moved and self.done >= 0.8 * wanted:
                moved = True
                self.migrate(step)
        self.settle(step, under_way)
        return began, self.now

    def capacities(self, step: int, count: int) -> dict[int, float]:
        """Tokens of each KV cache. Without the fault it holds all that its engine gets; with it, a part."""
        world = self.world
        whole = dict.fromkeys(range(world.replicas), 1e9)
        if world.fault == "kv_starvation" and step == world.step:
            mine = count / world.replicas
            whole[world.replica] = mine * (80 + self.usual) * (0.55 - 0.3 * world.strength)
        return whole

    def over(self, under_way: list[Request], wanted: int) -> bool:
        if self.budget is not None:
            return all(request.state in ("done", "paused") for request in under_way)
        return self.done >= min(wanted, len(under_way))

    def launch(self, step: int, request: Request, engine: Engine) -> None:
        if not request.begun:
            request.begun, request.born = True, self.now
            self.of(request, step, "request_start", None, batch_data_id=request.name[:9], session=0, validate=False)
            self.of(request, step, "turn_pre_process", 0.004, turn=1)
        else:
            away = self.now - request.since
            request.parked += away
            self.of(request, step, "request_requeued", None, tokens=request.got)
            self.of(request, step, "request_parked", away, turn=request.turn, reason="budget" if self.budget else "cut off")
        self.submit(request, engine)

    def submit(self, request: Request, engine: Engine) -> None:
        request.replica, request.state, request.stay = engine.number, "queued", request.stay + 1
        request.entered = request.since = self.now
        request.queued, request.stay_got, request.thrown, request.progress = 0.0, 0, 0, 0.0
        engine.queue.append(request)

    def speed(self, engine: Engine, step: int, began: float) -> float:
        world = self.world
        if world.fault == "slow_replica" and engine.number == world.replica:
            return 1 / (1.7 + 2.5 * world.strength)
        if world.fault == "slow_node" and engine.node == world.node:
            return 1 / (1.7 + 2.0 * world.strength)
        if world.fault == "stalled_replica" and engine.number == world.replica and step == world.step:
            usual = self.token_s * self.usual * 1.3
            start = began + 0.45 * usual
            return 0.0 if start <= self.now < start + usual * (0.6 + 1.5 * world.strength) else 1.0
        return 1.0

    def tick(self, step: int, began: float) -> None:
        self.now += TICK
        for engine in self.engines:
            speed = self.speed(engine, step, began)
            if speed:
                self.admit(engine, step)
                self.decode(engine, step, speed)
            if self.now - engine.told >= 1.0 and engine.running and speed:
                self.count(engine, step)
        for request in list(self.away):
            if self.now >= request.since:
                self.away.remove(request)
                self.back(request, step)

    def used(self, engine: Engine) -> float:
        return sum(request.context + request.got for request in engine.running)

    def admit(self, engine: Engine, step: int) -> None:
        room = self.capacity[engine.number] - self.used(engine)
        while engine.queue and room >= engine.queue[0].context + engine.queue[0].got:
            request = engine.queue.pop(0)
            room -= request.context + request.got
            waited = self.now - TICK * self.rng.random() - request.since
            request.queued += max(waited, 0.001)
            request.state, request.let_in = "running", self.now
            who = self.who(request, engine) | {"priority": 0}
            self.log("server", engine.number, step, self.now, "engine_queue", max(waited, 0.001), **who)
            engine.running.append(request)

    def who(self, request: Request, engine: Engine) -> dict:
        where = {"replica": engine.number, "node": engine.node}
        return {"request_id": request.name, "turn": request.turn, "stay": request.stay, **where}

    def decode(self, engine: Engine, step: int, speed: float) -> None:
        if not engine.running:
            return
        each = TICK * speed / (self.token_s * (1 + 0.01 * len(engine.running)))
        for request in list(engine.running):
            request.progress += each * self.rng.uniform(0.97, 1.03)
            whole = int(request.progress)
            request.progress -= whole
            left = request.lengths[request.turn - 1] - request.got
            if self.budget is not None:
                left = min(left, self.budget - self.spent[request.name])
            new = max(0, min(whole, left))
            request.got += new
            request.stay_got += new
            self.spent[request.name] += new
            engine.tokens += new
            if new == left:
                ended = request.got >= request.lengths[request.turn - 1]
                engine.running.remove(request)
                self.leave(request, engine, step, "stop" if ended else "length")
        while len(engine.running) > 1 and self.used(engine) > self.capacity[engine.number]:
            out = engine.running.pop()
            out.state, out.since = "queued", self.now
            out.thrown += 1
            engine.thrown += 1
            engine.queue.insert(0, out)
            where = {"replica": engine.number, "node": engine.node}
            self.log(
                "server",
                engine.number,
                step,
                self.now,
                "engine_retract",
                None,
                requests=1,
                token_usage=0.99,
                request_ids=[out.name],
                **where,
            )

    def leave(self, request: Request, engine: Engine, step: int, finish: str) -> None:
        """A stay ends."""
        whole = self.now - request.entered
        both = {"prompt_tokens": request.context, "response_tokens": request.stay_got, "version": self.version, "held_sec": 0.0}
        prefill = min(0.05, max(whole - request.queued, 0.0))
        queue = min(request.queued if request.state != "queued" else whole, whole)
        figures = {
            "queue_sec": queue,
            "prefill_sec": prefill,
            "decode_sec": max(whole - queue - prefill, 0.0),
            "retractions": request.thrown,
        }
        if finish == "abort" and not request.stay_got:
            figures = {}
        who = self.who(request, engine)
        self.log(
            "server",
            engine.number,
            step,
            self.now,
            "engine_generate",
            whole,
            **who,
            **both,
            **figures,
            finish=finish,
            priority=0,
            cached_tokens=0,
        )
        called = {key: value for key, value in who.items() if key != "request_id"} | both | {"finish_reason": finish}
        self.of(request, step, "turn_engine_call", whole + 0.004, self.now + 0.003, **called, queue_sec=figures.get("queue_sec"))
        if finish == "abort":
            return
        world = self.world
        if finish == "length" and self.budget is not None and request.got < request.lengths[request.turn - 1]:
            request.state, request.since = "paused", self.now
            return
        request.context += request.got
        request.got = 0
        if request.turn < len(request.lengths):
            slow = world.fault == "slow_tool" and step == world.step
            wait = request.tools[request.turn - 1] * (8 + 20 * world.strength if slow else 1)
            request.state = "away"
        else:
            slow = world.fault == "slow_reward" and step == world.step
            wait = request.reward
            if slow:
                wait = self.token_s * self.usual * (0.6 + 1.5 * world.strength) * self.rng.uniform(0.9, 1.1)
            request.state = "scoring"
        request.entered, request.since = self.now, self.now + wait
        self.away.append(request)

    def back(self, request: Request, step: int) -> None:
        if request.state == "away":
            self.of(
                request, step, "tool_execution", request.since - request.entered, request.since, turn=request.turn, tool="python"
            )
            request.turn += 1
            self.of(request, step, "turn_pre_process", 0.004, turn=request.turn)
            self.submit(request, self.engines[request.replica or 0])
            return
        seconds = request.since - request.entered
        self.of(request, step, "reward_calculation", seconds, request.since, turn=request.turn, score=round(self.rng.random(), 3))
        self.of(request, step, "finalization", seconds + 0.01, request.since + 0.01, turn=request.turn)
        request.state = "done"
        self.done += 1
        self.of(
            request, step, "async_rollout_request_complete", request.since + 0.011 - request.born, request.since + 0.011,
            batch_data_id=request.name[:9], session=0, validate=False, finish_reason="stop", turns=request.turn,
            stays=request.stay, response_length=sum(request.lengths), parked_sec=round(request.parked, 6), score=0.5,
        )  # fmt: skip

    def count(self, engine: Engine, step: int) -> None:
        seconds = self.now - engine.told
        capacity = self.capacity[engine.number]
        usage = min(self.used(engine) / (capacity if capacity < 1e8 else 200 * self.usual), 1.0)
        self.log(
            "server", engine.number, step, self.now, "engine_decode", min(seconds, 5.0), replica=engine.number, node=engine.node,
            running=len(engine.running), queued=len(engine.queue), token_usage=round(usage, 4),
            tokens_per_sec=round(engine.tokens / seconds, 3) if seconds < 5 else None, prefill_tokens_per_sec=0.0,
            retracted=engine.thrown, evicted_tokens=0,
        )  # fmt: skip
        engine.told, engine.tokens, engine.thrown = self.now, 0.0, 0

    def migrate(self, step: int) -> None:
        """The upper half of the replicas gives its nodes back."""
        keep = self.engines[: len(self.engines) // 2]
        for engine in self.engines[len(self.engines) // 2 :]:
            for request in [*engine.running, *engine.queue]:
                self.leave(request, engine, step, "abort")
                target = min(keep, key=lambda it: len(it.running) + len(it.queue))
                self.of(
                    request,
                    step,
                    "request_migrated",
                    None,
                    source=str(engine.number),
                    target=str(target.number),
                    tokens=request.got,
                )
                self.submit(request, target)
            engine.running, engine.queue = [], []

    def settle(self, step: int, under_way: list[Request]) -> None:
        for engine in self.engines:
            for request in [*engine.running, *engine.queue]:
                self.leave(request, engine, step, "abort")
                self.of(
                    request, step, "aborted_request_with_cancelled_error", None, reason="cut off", response_length=request.got
                )
                request.since, request.state = self.now, "parked"
            engine.running, engine.queue = [], []
        for request in [it for it in self.away if it.state in ("away", "scoring")]:
            if request.state == "away":
                request.turn += 1
            else:
                request.lengths[-1] += 8  # its answer is thrown away, and it goes on for a little
                request.got = request.lengths[-1] - 8
                request.context -= request.got
            self.of(request, step, "aborted_request_with_cancelled_error", None, reason="cut off", response_length=request.got)
            request.since, request.state = self.now, "parked"
        self.away = []
        self.left = [request for request in under_way if request.state in ("parked", "paused")]


def make(directory: Path, world: World) -> Path:
    """The run of a world: one job, or two that take turns."""
    jobs = [Run(directory, world, "a")]
    if world.mode == "multiplexed":
        quiet = World(**{**world.__dict__, "fault": None})
        jobs.append(Run(directory, quiet, "b"))
    free = {"rollout": 0.0, "train": 0.0}
    coordinator = Run(directory, world, "coordinator")
    token = 0
    for step in range(1, world.steps + 1):
        for job in jobs:
            token += 1
            began = job.now
            token = _one_step(job, step, began, free, coordinator, token)
    for job in jobs:
        job.write()
    if world.mode == "multiplexed":
        coordinator.write()
    return directory


def _one_step(job: Run, step: int, began: float, free: dict[str, float], coordinator: Run, token: int) -> int:
    ends = {}
    for phase in ("rollout", "train"):
        asked = job.now
        granted = max(asked, free[phase])
        nodes = sorted({engine.node for engine in job.engines}) if phase == "rollout" else ["t0"]
        about = {"phase": phase, "nodes": nodes, "token": token}
        job.log("trainer", 0, step, granted, "lease_wait", granted - asked, **about)
        coordinator.log("coordinator", 0, step, granted, "lease_wait", granted - asked, job=job.name, **about)
        job.now = granted
        if phase == "rollout":
            job.log("trainer", 0, step, job.now + 0.3, "sync", 0.3, bytes=1000, version=job.version, ranks=1)
            ends["asleep"] = job.now
            job.now += 0.3
            start, end = job.step(step)
            job.log("trainer", 0, step, end, "generate", end - start)
            job.now += 0.05
            job.log("trainer", 0, step, job.now, "sample_ready", 0.05)
        else:
            job.now += (ends["rollout"] - ends["asleep"]) * job.rng.uniform(0.85, 1.0)
            job.log("trainer", 0, step, job.now, "update_actor", 0.7 * (job.now - granted))
        ends[phase] = job.now
        job.log("trainer", 0, step, job.now, "phase", job.now - granted, **about)
        coordinator.log("coordinator", 0, step, job.now, "lease_held", job.now - granted, job=job.name, **about)
        free[phase] = job.now
        token += 1
    job.version += 1
    job.log("trainer", 0, step, job.now, "step", job.now - began, reward=0.5, response_length=float(job.usual), tokens=1000)
    if job.world.mode == "async":
        # The next rollout began while this step trained.
        job.now -= 0.9 * (ends["train"] - ends["rollout"])
    return token
