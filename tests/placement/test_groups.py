"""The groups, their nodes, and which of them are looked at first."""

import bisect
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.placement.made_jobs import ANY_MODES, jobs, make_cluster, make_job
from verl_mux.placement.groups import Groups, Nodes, isolated
from verl_mux.placement.model import Group, Pin


@pytest.mark.parametrize("closed", [frozenset(), frozenset(["rollout-0"])])
def test_a_group_that_was_taken_back_holds_its_nodes(closed):
    cluster = make_cluster(2, 2)
    before = Groups(cluster)
    (group,) = before.replace([], [isolated(make_job("a", 9, 9))])
    groups = Groups(msgspec.structs.replace(cluster, closed=closed))
    groups.adopt([group])
    free = groups.free
    groups.replace([group], [])
    (again,) = groups.replace([], [group])
    assert groups.free == free
    (other,) = groups.replace([], [isolated(make_job("b", 9, 9))])
    assert set(other.rollout_nodes).isdisjoint(again.rollout_nodes)
    groups.replace([again], [])


POOL = make_cluster(4, 4).rollout


def test_low_numbers_go_first():
    nodes = Nodes(POOL)
    assert [nodes.take() for _ in range(2)] == ["rollout-0", "rollout-1"]
    nodes.release(["rollout-0"])
    assert nodes.take() == "rollout-0"


@given(
    takes=st.integers(0, 4),
    closed=st.sets(st.sampled_from(POOL.nodes)),
)
def test_each_node_that_is_not_closed_is_taken_once(takes, closed):
    nodes = Nodes(POOL, closed)
    taken = [nodes.take() for _ in range(min(takes, int(nodes.free)))]
    assert len(set(taken)) == len(taken) and closed.isdisjoint(taken)
    assert nodes.free == 4 - len(closed) - len(taken)


CLUSTER = make_cluster()
USD = CLUSTER.rollout.kind.usd_per_hour, CLUSTER.train.kind.usd_per_hour


def made_groups(members, sizes) -> list[Group]:
    """Consecutive jobs in groups of these sizes, on as many nodes as the widest needs."""
    groups, rest = [], list(members)
    for number, size in enumerate(sizes):
        mine, rest = rest[:size], rest[size:]
        if not mine:
            break
        rollout = tuple(f"r{number}-{i}" for i in range(max(job.nodes[0] for job in mine)))
        train = tuple(f"t{number}-{i}" for i in range(max(job.nodes[1] for job in mine)))
        pins = tuple(Pin(job=job, rollout=rollout[: job.nodes[0]], train=train[: job.nodes[1]]) for job in mine)
        groups.append(Group(name=f"g{number}", pins=pins, rollout_nodes=rollout, train_nodes=train))
    return groups


def scanned(groups, job, cap, room, below, best_fit):
    found = []
    for turn, group in enumerate(groups):
        roomy = bisect.bisect_right(group.rollout_used, room[0]), bisect.bisect_right(group.train_used, room[1])
        shared = min(roomy[0], job.nodes[0]), min(roomy[1], job.nodes[1])
        new = job.nodes[0] - shared[0], job.nodes[1] - shared[1]
        least = new[0] * USD[0] + new[1] * USD[1]
        if len(group.pins) < cap and least < below and shared != (0, 0):
            found.append((least, -group.fullness if best_fit else 0.0, turn, group.name))
    return [(least, name) for least, _, _, name in sorted(found)]


@given(
    members=jobs(most=12, nodes=3, modes=ANY_MODES).map(lambda drawn: [job.in_modes[-1] for job in drawn]),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    gone=st.sets(st.integers(0, 11)),
    cap=st.integers(1, 5),
    room=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    below=st.sampled_from((20.0, 50.0, math.inf)),
    best_fit=st.booleans(),
)
def test_openings_and_the_emptiest_are_those_of_a_scan(members, sizes, gone, cap, room, below, best_fit):
    newcomer, *members = members
    table, groups = Groups(CLUSTER), made_groups(members, sizes)
    table.adopt(groups)
    # Some leave, and every second of them comes back, as the youngest.
    left = [group for number, group in enumerate(groups) if number in gone]
    for group in left:
        table._drop(group.name)
    table.adopt(left[::2])
    there = [group for group in groups if group not in left] + left[::2]

    found = [(least, group.name) for least, group in table.openings(newcomer, cap, room, below, best_fit)]
    assert found == scanned(there, newcomer, cap, room, below, best_fit)
    for count in range(len(there) + 2):
        assert table.emptiest(count) == sorted(there, key=lambda group: group.fullness)[:count]


def test_a_group_keeps_its_turn_when_its_order_changes():
    groups = Groups(CLUSTER)
    groups.adopt(made_groups([make_job("a", 100, 100), make_job("b", 100, 100)], [1, 1]))
    groups.reorder("g0", "longest-first")
    assert [group.name for group in groups.emptiest(2)] == ["g0", "g1"]
