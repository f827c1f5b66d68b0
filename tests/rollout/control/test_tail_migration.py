"""What is given back together, and what the plan is asked. Carrying out is tested on real engines, in tests/e2e."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl_mux.errors import UserError
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.rollout.control import tail_migration as module
from verl_mux.rollout.control.migration_plan import Migration, MigrationPolicy, Stay
from verl_mux.rollout.control.tail_migration import Room, TailMigration, Unit, units
from verl_mux.rollout.messages import RunningSample


@pytest.mark.parametrize(
    ("runs_on", "expected"),
    [
        (["r0", "r1"], [Unit(("r0",), (0,), ("a",)), Unit(("r1",), (1,), ("b",))]),
        (["r0", "r1", "r1", "r0"], [Unit(("r0",), (0, 3), ("a", "d")), Unit(("r1",), (1, 2), ("b", "c"))]),
        (["r0 r1", "r2 r3"], [Unit(("r0", "r1"), (0,), ("a",)), Unit(("r2", "r3"), (1,), ("b",))]),
    ],
)
def test_what_is_given_back_are_nodes_and_the_replicas_that_run_there(runs_on, expected):
    assert units([nodes.split() for nodes in runs_on], "abcd"[: len(runs_on)]) == expected


@pytest.mark.parametrize("runs_on", [["r0", "r0", "r1"], ["r0", "r0 r1", "r1"], ["r0 r1", "r0 r1", "r0 r1"]])
def test_replicas_that_cannot_leave_a_node_together_are_refused(runs_on):
    with pytest.raises(UserError, match="3 replicas on 2 rollout nodes; allowed: whole replicas on each node"):
        units([nodes.split() for nodes in runs_on], ["a", "b", "c"])


ROOM = Room(longest=100, max_requests=4, max_tokens=1000)


def migration(gangs: list[list[str]]) -> TailMigration:
    return TailMigration(
        MigrationPolicy(), units([["r0"], ["r1"]], ["a", "b"]), workers=list, balancer=None, handles={},
        gangs=lambda: gangs, vacate=lambda unit: None, log=None, room=ROOM,
    )  # fmt: skip


@pytest.mark.parametrize(("gangs", "done"), [([], 90), ([["r1"]], 79), ([["r1"]], 100)])
def test_nobody_is_asked_before_it_can_matter(gangs, done):
    assert isinstance(migration(gangs).consider(done, 100), Stay)


def test_what_runs_is_expected_to_last_as_long_again_within_the_limit():
    samples = [
        RunningSample("g", 0, "a", 50, 30, 0.1),
        RunningSample("g", 1, "b", 20, 0, 0.9),
        RunningSample("g", 2, None, 10, 0, 0.0),
    ]
    first, second = ROOM.replicas(units([["r0"], ["r1"]], ["a", "b"]), samples, token_s=0.01)
    assert [(r.id, r.context, r.remaining) for r in first.requests] == [("g_0", 60, 40.0)]
    assert [(r.id, r.context, r.remaining) for r in second.requests] == [("g_1", 110, 10.0)]


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
    monkeypatch.setattr(module.ray, "get", lambda answers: answers)
    it = TailMigration(
        MigrationPolicy(threshold=0.5, min_gain_s=0.0, max_slowdown=9.0), units([["r0"], ["r1"], ["r2"]], ["a", "b", "c"]),
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
