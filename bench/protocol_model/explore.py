"""Random schedules of faults against the protocol: `explore(schedules, seed)`; one seed is one schedule, and always the same.

Faults: messages doubled and late, connections cut, drivers stopped and killed, the coordinator killed at any point of its work
and paused, with a journal and without, newcomers at any time, evictions, the wall clock set by an hour. Then calm: every job must
get through.

Without a journal no driver is stopped or killed: a coordinator that forgot everything cannot know of a job that cannot speak,
nor of what a dead one left behind. docs/protocol.md says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from bench.protocol_model.coordinator import CoordinatorProcess
from bench.protocol_model.job import JobProcess
from bench.protocol_model.scene import FAULTS_S, LEASE_S, Scene
from bench.protocol_model.world import World

PLANTED = ("journal skipped", "token unchecked", "early grant")


class Found(NamedTuple):
    """`seeds`: those whose schedule violated anything. `story`: what happened in the last of them."""

    schedules: int
    violations: Counter[str]
    faults: Counter[str]
    seeds: list[int]
    story: list[str]


def explore(schedules: int, seed: int, planted: str = "", progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> Found:
    """`planted`: one of PLANTED, a fault of our own that must be found."""
    found = Found(schedules, Counter(), Counter(), [], [])
    for number in progress(range(seed, seed + schedules)):
        world = run(number, planted)
        found.violations.update(world.violations)
        found.faults.update(world.faults)
        if world.violations:
            found.seeds.append(number)
            found.story[:] = world.story
    return found


def run(seed: int, planted: str = "") -> World:
    """One schedule, from first fault to last job."""
    scene = Scene(World(seed), planted)
    world = scene.world
    rng = world.rng
    for _ in range(rng.randint(2, 3)):
        scene.join()
    for _ in range(rng.randint(0, 3)):
        world.later(rng.uniform(0.0, FAULTS_S), scene.join)
    for _ in range(rng.randint(1, 12)):
        world.later(rng.uniform(0.0, FAULTS_S), lambda: _fault(world, scene.coordinator, scene.jobs))
    scene.play()
    return world


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
