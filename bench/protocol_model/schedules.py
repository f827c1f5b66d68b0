"""Schedules of faults against the protocol, in virtual time; one seed is one schedule, and always the same.

`explore`: random faults: messages doubled and late, connections cut, drivers stopped and killed, the coordinator killed at any
point of its work and paused, with a journal and without, newcomers at any time, evictions, the wall clock set by an hour. Then
calm: every job must get through. Without a journal no driver is stopped or killed: a coordinator that forgot everything cannot
know of a job that cannot speak, nor of what a dead one left behind. docs/protocol.md says so.
`kill_at_each`: the coordinator killed at each kind of message and each point of its handling, and nothing else.
`cut_off`: jobs cut off from their coordinator for any time, and nothing else.

Runs in one process; called by chaos_bench.py and tests/coordinator/model. Pure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.protocol_model.coordinator import CoordinatorProcess, DieAt
from bench.protocol_model.job import JobProcess
from bench.protocol_model.world import World
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.settings import Config, Node, Pool, Segment

PLANTED = ("journal skipped", "token unchecked", "early grant")
# Messages at which a coordinator is killed: before anything is written, once it is written, once the first answer is out.
POINTS = ("received", "written", "sent")
TYPES: tuple[type[m.FromJob], ...] = (
    *(m.Register, m.LeaseRequest, m.LeaseRelease, m.LeaseShrink, m.LeaseCancel, m.Heartbeat, m.Progress, m.StepReport),
    *(m.MemoryReport, m.HostReport, m.PhaseNote, m.MemberReport, m.Detach, m.Failing, m.Deregister),
)
_SELDOM = (m.Register, m.LeaseShrink, m.Detach, m.Deregister, m.Failing)
LEASE_S = 5.0
FAULTS_S = 60.0
_CALM_S = 900.0
_JOBS = 3
_CUTS = 5  # of a schedule
_SCHEDULES = (
    [Segment(mode="interleaved")],
    [Segment(mode="interleaved")],
    [Segment(mode="sequential", steps=1), Segment(mode="interleaved")],
)
_SETS = ({"rollout": ["r0"], "train": ["t0"]}, {"rollout": ["r0", "r1"], "train": ["t0"]}, {"rollout": ["r1"], "train": ["t0"]})


@dataclass
class Found:
    """Of some schedules. again: the arguments of those that violated anything. story: what happened in the last of them."""

    schedules: int = 0
    violations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    again: list[Any] = field(default_factory=list)
    story: list[str] = field(default_factory=list)

    def add(self, world: World, arguments: Any) -> None:
        self.schedules += 1
        self.violations.update(world.violations)
        self.faults.update(world.faults)
        if world.violations:
            self.again.append(arguments)
            self.story = world.story


class Scene:
    """A coordinator with three nodes: `join` as often as wanted -> `play`. `remembers` None: drawn."""

    def __init__(self, world: World, planted: str = "", remembers: bool | None = None, die_at: DieAt | None = None) -> None:
        self.world, self._planted = world, planted
        rng = world.rng
        pools = {"rollout": Pool(nodes=[Node(name="r0"), Node(name="r1")]), "train": Pool(nodes=[Node(name="t0")])}
        schedule, kill_grace = rng.choice(_SCHEDULES), rng.choice([0.1, 2.0])
        config = Config(pools=pools, schedule=schedule, lease_timeout=LEASE_S, kill_grace=kill_grace)
        remembers = rng.random() < 0.7 if remembers is None else remembers
        self.coordinator = CoordinatorProcess(world, config, remembers, planted, die_at)
        self.jobs: list[JobProcess] = []

    def join(self, says_all: bool = False) -> None:
        rng, number = self.world.rng, len(self.jobs) + 1
        nodes, steps = _SETS[number % len(_SETS)] if says_all else rng.choice(_SETS), rng.randint(1, 4)
        job = JobProcess(self.world, self.coordinator, number, nodes, steps, LEASE_S, self._planted, says_all)
        self.jobs.append(job)

    def play(self) -> World:
        """Until all jobs have ended, or have had more than enough time to."""
        self.world.run(FAULTS_S)
        self.world.calm = True
        self.world.run(FAULTS_S + _CALM_S, over=lambda: not any(job.driver_lives for job in self.jobs))
        for job in self.jobs:
            if job.driver_lives:
                self.world.violated("waits for ever", job.name)
        return self.world


def explore(schedules: int, seed: int, planted: str = "") -> Found:
    """`planted`: one of PLANTED, a fault of our own that must be found."""
    found = Found()
    for number in range(seed, seed + schedules):
        found.add(run(number, planted), number)
    return found


def run(seed: int, planted: str = "") -> World:
    """One schedule of random faults, from the first fault to the last job."""
    scene = Scene(World(seed), planted)
    world, rng = scene.world, scene.world.rng
    for _ in range(rng.randint(2, 3)):
        scene.join()
    for _ in range(rng.randint(0, 3)):
        world.later(rng.uniform(0.0, FAULTS_S), scene.join)
    for _ in range(rng.randint(1, 12)):
        world.later(rng.uniform(0.0, FAULTS_S), lambda: _fault(world, scene.coordinator, scene.jobs))
    return scene.play()


def _fault(world: World, coordinator: CoordinatorProcess, jobs: list[JobProcess]) -> None:
    rng = world.rng
    job = rng.choice(jobs)
    seconds = LEASE_S * rng.choice([0.1, 0.5, 1.0, 1.5, 4.0]) * rng.uniform(0.5, 1.5)
    kind = rng.random()
    if kind < 0.4:
        rng.choice([coordinator.crash, coordinator.crash_soon])()
    elif kind < 0.5:
        coordinator.pause(seconds)
    elif kind < 0.75 or not coordinator.remembers and kind < 0.95:
        job.cut(seconds)
    elif kind < 0.88:
        job.stop(seconds)
    elif kind < 0.95:
        job.kill()
    elif kind < 0.97:
        coordinator.evict(job)
    else:
        world.fault("wall clock set")
        world.clock_step += rng.choice([-3600.0, 3600.0])


def kill_at_each(seeds: Iterable[int], planted: str = "") -> Found:
    """faults: also by type of message, how often the coordinator was killed there."""
    found = Found()
    for seed, kind, point in itertools.product(seeds, TYPES, POINTS):
        world = _run_kill(kind, point, seed, planted)
        found.add(world, (name(kind), point, seed))
        found.faults[name(kind)] += world.faults["coordinator killed"]
    return found


def _run_kill(kind: type[m.FromJob], point: str, seed: int, planted: str) -> World:
    """Three jobs that send every message there is, and one death of the coordinator, which keeps a journal."""
    world = World(seed)
    world.calm = True  # no message is lost or doubled
    nth = 1 if kind in _SELDOM else world.rng.randint(1, 4)
    scene = Scene(world, planted, remembers=True, die_at=DieAt(kind, point, nth))
    for _ in range(_JOBS):
        scene.join(says_all=True)
    scene.play()
    for job in scene.jobs:
        if not job.has_finished:
            world.violated("did not finish", job.name)
    return world


def name(kind: type[m.FromJob]) -> str:
    return str(kind.__struct_config__.tag)


def cut_off(partitions: int, seed: int, planted: str = "") -> Found:
    """At least `partitions` cuts, faults "network cut", in schedules from `seed` on. Faults "stale calls": calls that would have
    mapped memory after their lease had expired; violations "mapped after expiry": those of them that were let through."""
    found = Found()
    while found.faults["network cut"] < partitions:
        number = seed + found.schedules
        scene = Scene(World(number), planted)
        for _ in range(_JOBS):
            scene.join()
        for _ in range(_CUTS):
            scene.world.later(scene.world.rng.uniform(0.0, FAULTS_S / 2), lambda scene=scene: _cut_one(scene))  # type: ignore[misc]
        found.add(scene.play(), number)
    return found


def _cut_one(scene: Scene) -> None:
    rng = scene.world.rng
    if running := [job for job in scene.jobs if job.driver_lives]:
        rng.choice(running).cut(rng.uniform(0.0, 4 * LEASE_S))
