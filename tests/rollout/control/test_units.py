"""Which engines come and go together, and what a plan is told of them."""

from __future__ import annotations

import pytest

from verl_mux.errors import UserError
from verl_mux.rollout.control.units import Room, Unit, units
from verl_mux.rollout.messages import RunningSample

ASKED = "mux.rollout.growth.own=['r0']"
ROOM = Room(longest=100, max_requests=4, max_tokens=1000)


@pytest.mark.parametrize(
    ("runs_on", "expected"),
    [
        (["r0", "r1"], [Unit(("r0",), (0,), ("a",)), Unit(("r1",), (1,), ("b",))]),
        (["r0", "r1", "r1", "r0"], [Unit(("r0",), (0, 3), ("a", "d")), Unit(("r1",), (1, 2), ("b", "c"))]),
        (["r0 r1", "r2 r3"], [Unit(("r0", "r1"), (0,), ("a",)), Unit(("r2", "r3"), (1,), ("b",))]),
    ],
)
def test_what_is_given_back_are_nodes_and_the_replicas_that_run_there(runs_on, expected):
    assert units([nodes.split() for nodes in runs_on], "abcd"[: len(runs_on)], ASKED) == expected


@pytest.mark.parametrize("runs_on", [["r0", "r0", "r1"], ["r0", "r0 r1", "r1"], ["r0 r1", "r0 r1", "r0 r1"]])
def test_replicas_that_cannot_leave_a_node_together_are_refused(runs_on):
    with pytest.raises(UserError, match="3 replicas on 2 rollout nodes; allowed: whole replicas on each node") as error:
        units([nodes.split() for nodes in runs_on], ["a", "b", "c"], ASKED)
    assert str(error.value).startswith(f"{ASKED} is not possible with ")


def test_what_runs_is_expected_to_last_as_long_again_within_the_limit():
    samples = [
        RunningSample("g", 0, "a", 50, 30, 0.1),
        RunningSample("g", 1, "b", 20, 0, 0.9),
        RunningSample("g", 2, None, 10, 0, 0.0),
    ]
    first, second = ROOM.replicas(units([["r0"], ["r1"]], ["a", "b"], ASKED), samples, token_s=0.01)
    assert [(r.id, r.context, r.remaining) for r in first.requests] == [("g_0", 60, 40.0)]
    assert [(r.id, r.context, r.remaining) for r in second.requests] == [("g_1", 110, 10.0)]
