"""What goes wrong in a schedule, drawn from its seed. Pure. Called by schedule.py and kills.py."""

from __future__ import annotations

import random

import msgspec

from bench.protocol_model import schedules
from bench.protocol_model.schedules import POINTS, name

LEASE_S = 3.0
TYPES = [name(kind) for kind in schedules.TYPES]
# Files that are deleted while the coordinator is dead: the journal alone, or all that it has on disk.
LOST_FILES = {"coordinator without its journal": "journal", "coordinator without any memory": "journal*"}
# kind -> how often, relative to the others
KINDS = {
    "coordinator killed": 3,
    "coordinator killed at a message": 6,
    "coordinator stopped": 2,
    **dict.fromkeys(LOST_FILES, 1),
    "job killed": 3,
    "job stopped": 3,
    "job cut off": 3,
    "newcomer": 2,
}
_EVERY_S = 3.0
_FIRST_S = 0.5


class Fault(msgspec.Struct, frozen=True):
    """`at`: seconds after every job's first step. `job`: the job that it happens to. `seconds`: how long it lasts; of a
    coordinator that is killed, how long until it is started again. `die_at`: TYPE:POINT:COUNT, for the coordinator that is
    started then."""

    at: float
    kind: str
    job: str = ""
    seconds: float = 0.0
    die_at: str = ""


def draw(seed: int, seconds: float, jobs: list[str]) -> list[Fault]:
    """In order of time."""
    rng = random.Random(seed)
    found: list[Fault] = []
    at = _FIRST_S
    while (at := at + rng.uniform(0.2, 2 * _EVERY_S)) < seconds:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        fault = _one(rng, at, kind, jobs, len(found))
        found.append(fault)
        if kind.startswith("coordinator"):
            at += fault.seconds
    return found


def _one(rng: random.Random, at: float, kind: str, jobs: list[str], number: int) -> Fault:
    if kind == "newcomer":
        return Fault(at, kind, job=f"new{number}")
    if kind in ("job stopped", "job cut off"):
        return Fault(at, kind, job=rng.choice(jobs), seconds=rng.choice((0.3, 0.8, 2.0)) * LEASE_S * rng.uniform(0.5, 1.0))
    if kind == "job killed":
        return Fault(at, kind, job=rng.choice(jobs))
    if kind == "coordinator stopped":
        return Fault(at, kind, seconds=rng.uniform(0.1, 1.5 * LEASE_S))
    die_at = ""
    if kind == "coordinator killed at a message":
        die_at = f"{rng.choice(TYPES)}:{rng.choice(POINTS)}:{rng.randint(1, 4)}"
    return Fault(at, kind, seconds=rng.uniform(0.0, 1.0), die_at=die_at)
