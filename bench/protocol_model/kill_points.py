"""The coordinator killed at each kind of message and each point of its handling, and nothing else: all jobs must finish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from bench.protocol_model.coordinator import DieAt
from bench.protocol_model.scene import Scene
from bench.protocol_model.world import World
from verl_mux.coordinator.bus import messages as m

POINTS = ("received", "written", "sent")
TYPES: tuple[type[m.FromJob], ...] = (
    *(m.Register, m.LeaseRequest, m.LeaseCancel, m.LeaseRelease, m.LeaseShrink, m.Heartbeat, m.Detach, m.Deregister, m.Failing),
    *(m.Progress, m.StepReport, m.MemoryReport, m.HostReport, m.PhaseNote, m.MemberReport),
)
_SELDOM = (m.Register, m.LeaseShrink, m.Detach, m.Deregister, m.Failing)
_JOBS = 3


class Killed(NamedTuple):
    """`kills`: how often the coordinator was killed, by type. `again`: (type, point, seed) of what violated anything."""

    schedules: int
    kills: Counter[str]
    violations: Counter[str]
    again: list[tuple[str, str, int]]


def kill_at_each(seeds: Iterable[int], planted: str = "") -> Killed:
    found = Killed(0, Counter(), Counter(), [])
    for seed in seeds:
        for kind in TYPES:
            for point in POINTS:
                world = run(kind, point, seed, planted)
                found = found._replace(schedules=found.schedules + 1)
                found.kills[name(kind)] += world.faults["coordinator killed"]
                found.violations.update(world.violations)
                if world.violations:
                    found.again.append((name(kind), point, seed))
    return found


def run(kind: type[m.FromJob], point: str, seed: int, planted: str = "") -> World:
    """One schedule: three jobs that say everything there is to say, and one death of the coordinator, which keeps a journal."""
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
