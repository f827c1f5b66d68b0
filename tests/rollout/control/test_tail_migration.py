"""What is given back together, and what the plan is asked. Carrying out is tested on real engines, in tests/e2e."""

from __future__ import annotations

import pytest

from verl_mux.errors import UserError
from verl_mux.rollout.control.migration_plan import MigrationPolicy, Stay
from verl_mux.rollout.control.tail_migration import TailMigration, Unit, units
from verl_mux.rollout.messages import RunningSample


@pytest.mark.parametrize(
    ("nodes", "servers", "expected"),
    [
        (["r0", "r1"], ["a", "b"], [Unit(("r0",), (0,), ("a",)), Unit(("r1",), (1,), ("b",))]),
        (["r0", "r1"], list("abcd"), [Unit(("r0",), (0, 1), ("a", "b")), Unit(("r1",), (2, 3), ("c", "d"))]),
        (["r0", "r1", "r2", "r3"], ["a", "b"], [Unit(("r0", "r1"), (0,), ("a",)), Unit(("r2", "r3"), (1,), ("b",))]),
    ],
)
def test_replicas_fill_nodes_in_order(nodes, servers, expected):
    assert units(nodes, servers) == expected


def test_replicas_across_nodes_are_refused():
    with pytest.raises(UserError, match="3 replicas on 2 rollout nodes; allowed: whole replicas on each node"):
        units(["r0", "r1"], ["a", "b", "c"])


def migration(contended: list[str]) -> TailMigration:
    return TailMigration(
        MigrationPolicy(), units(["r0", "r1"], ["a", "b"]), workers=list, balancer=None, handles={}, contended=lambda: contended,
        vacate=lambda unit: None, log=None, longest=100, max_requests=4, max_tokens=1000,
    )  # fmt: skip


@pytest.mark.parametrize(("contended", "done"), [([], 90), (["r1"], 79), (["r1"], 100)])
def test_nobody_is_asked_before_it_can_matter(contended, done):
    assert isinstance(migration(contended).consider(done, 100), Stay)


def test_what_runs_is_expected_to_last_as_long_again_within_the_limit():
    samples = [
        RunningSample("g", 0, "a", 50, 30, 0.1),
        RunningSample("g", 1, "b", 20, 0, 0.9),
        RunningSample("g", 2, None, 10, 0, 0.0),
    ]
    first, second = migration([])._replicas(samples, token_s=0.01)
    assert [(r.id, r.context, r.remaining) for r in first.requests] == [("g_0", 60, 40.0)]
    assert [(r.id, r.context, r.remaining) for r in second.requests] == [("g_1", 110, 10.0)]
