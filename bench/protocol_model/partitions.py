"""Jobs cut off from their coordinator for any time, and nothing else: no call maps memory under a lease that has expired."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

from bench.protocol_model.scene import FAULTS_S, LEASE_S, Scene
from bench.protocol_model.world import World

_PER_SCHEDULE = 5
_JOBS = 3
_LONGEST_S = 4 * LEASE_S


class Cut(NamedTuple):
    """`late_calls`: that would have mapped memory after their lease had expired, and `accepted` of them. `seeds`: of schedules
    that violated anything."""

    partitions: int
    late_calls: int
    accepted: int
    violations: Counter[str]
    seeds: list[int]


def cut_off(partitions: int, seed: int, planted: str = "") -> Cut:
    """At least `partitions` partitions, in schedules from `seed` on."""
    found = Cut(0, 0, 0, Counter(), [])
    for number in itertools.count(seed):
        if found.partitions >= partitions:
            break
        world = run(number, planted)
        found.violations.update(world.violations)
        found = found._replace(
            partitions=found.partitions + world.faults["network cut"],
            late_calls=found.late_calls + world.faults["stale calls"],
            accepted=found.accepted + world.violations["mapped after expiry"],
            seeds=[*found.seeds, number] if world.violations else found.seeds,
        )
    return found


def run(seed: int, planted: str = "") -> World:
    """One schedule: three jobs, and five partitions, each of a job that runs, for up to four leases."""
    world = World(seed)
    scene = Scene(world, planted)
    for _ in range(_JOBS):
        scene.join()
    for _ in range(_PER_SCHEDULE):
        world.later(world.rng.uniform(0.0, FAULTS_S / 2), lambda: _cut_one(scene))
    scene.play()
    return world


def _cut_one(scene: Scene) -> None:
    rng = scene.world.rng
    if running := [job for job in scene.jobs if not job.has_ended]:
        rng.choice(running).cut(rng.uniform(0.0, _LONGEST_S))
