"""What is given back together, and what the plan is asked. Carrying out is tested on real engines, in tests/e2e."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.rollout.control import tail_migration as module
from verl_mux.rollout.control.migration_plan import Migration, MigrationPolicy, Stay
from verl_mux.rollout.control.tail_migration import TailMigration
from verl_mux.rollout.control.units import Room, units
from verl_mux.rollout.messages import RunningSample

ASKED = "mux.rollout.migration.enable=True"
ROOM = Room(longest=100, max_requests=4, max_tokens=1000)


def migration(gangs: list[list[str]]) -> TailMigration:
    return TailMigration(
        MigrationPolicy(), units([["r0"], ["r1"]], ["a", "b"], ASKED), workers=list, balancer=None, handles={},
        gangs=lambda: gangs, vacate=lambda unit: None, log=None, room=ROOM,
    )  # fmt: skip


@pytest.mark.parametrize(("gangs", "done"), [([], 90), ([["r1"]], 79), ([["r1"]], 100)])
def test_nobody_is_asked_before_it_can_matter(gangs, done):
    assert isinstance(migration(gangs).consider(done, 100), Stay)


def test_the_plans_targets_are_carried_out(monkeypatch):
    """Three units; `a` is emptied, and each of its requests goes where the plan put it."""
    told, freed = [], []

    def remote(answer):
        return SimpleNamespace(remote=lambda *given: (told.append(given), answer)[1])

    samples = [RunningSample("g", n, "a", 40, 30, 0.0) for n in range(2)] + [
        RunningSample("h", n, "b", 40, 20, 0.0) for n in range(3)
    ]
    worker = SimpleNamespace(running_samples=remote((samples, 0.01)), evacuate=remote(0))
    balancer = SimpleNamespace(remove_servers=remote(None))
    monkeypatch.setattr(module.ray, "get", lambda answers: answers)  # the one that units.py has too
    it = TailMigration(
        MigrationPolicy(threshold=0.5, min_gain_s=0.0, max_slowdown=9.0), units([["r0"], ["r1"], ["r2"]], ["a", "b", "c"], ASKED),
        workers=lambda: [worker], balancer=balancer, handles={name: name.upper() for name in "abc"}, gangs=lambda: [["r0"]],
        vacate=freed.append, log=NULL_LOG, room=Room(1000, 8, 10**6),
    )  # fmt: skip
    it.begin(1)
    found = it.consider(90, 100)
    assert isinstance(found, Migration)
    planned = {("g", int(move.request[-1])): move.target for move in found.moves}
    assert set(planned.values()) <= {"r1", "r2"}
    names, targets = next(given for given in told if len(given) == 2)
    assert names == ["a"]
    assert targets == {sample: {"r1": ("b", "B"), "r2": ("c", "C")}[unit] for sample, unit in planned.items()}
    assert [unit.nodes for unit in freed] == [("r0",)]
