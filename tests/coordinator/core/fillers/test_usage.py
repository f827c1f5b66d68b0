"""What share of the time that jobs leave on a node fillers used."""

import pytest

from tests.coordinator.core.fillers.test_granting import World
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.snapshot import describe


def used(world, node="r0"):
    seen = describe(world.machine.state, world.machine.config, world.now, {})
    return seen["pools"]["rollout"]["nodes"][node]["usage"]


def test_seconds_of_jobs_and_fillers_count_from_the_first_lease_on_the_node():
    world = World()
    world.register("a", {"rollout": ["r0"], "train": ["t0"]})
    world.step("a", 10, 20, 1)
    world.fill(nodes={"rollout": ["r0"]})
    world.now += 10
    world.release("f")
    found = used(world)
    assert (found["jobs_s"], found["fillers_s"]) == (10.0, 11.0)
    assert found["bubble_filled"] == pytest.approx(11.0 / (found["seconds"] - 10.0))


def test_a_lease_that_is_held_counts_too():
    world = World()
    world.fill()
    world.now += 5
    assert used(world)["fillers_s"] == 5.0 and used(world)["bubble_filled"] == 1.0


def test_of_a_node_that_nobody_used_nothing_is_said():
    assert used(World()) == {"seconds": 0.0, "jobs_s": 0.0, "fillers_s": 0.0, "bubble_filled": None}


def test_nodes_that_go_back_before_the_rest_count_until_then():
    world = World()
    world.register("a")
    world.ask("a", "rollout", 1, ["r0", "r1"])
    world.now += 4
    world.do(m.LeaseShrink(**world.who("a"), key="s", token=1, nodes=["r0"]))
    world.now += 4
    world.release("a")
    assert (used(world, "r0")["jobs_s"], used(world, "r1")["jobs_s"]) == (5.0, 10.0)
