"""What a Ray cluster must offer before a job's workers start, and the order in which verl numbers ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")
from verl_mux.errors import UserError
from verl_mux.places.place import Place
from verl_mux.places.ray_nodes import RayNode, check_cluster, in_rank_order

BOUND = {"r0": Place(host="a"), "t0": Place(host="b"), "t1": Place(host="c")}
CLUSTER = [
    RayNode("10.0.0.9", 0),  # a head without GPU
    RayNode("10.0.0.1", 8, {"GPU": 8, "mux_r0": 1}),
    RayNode("10.0.0.3", 8, {"GPU": 8, "mux_t0": 1}),
    RayNode("10.0.0.20", 4, {"GPU": 4, "mux_t1": 1}),
]


def refusal(places, gpus, cluster) -> str:
    with pytest.raises(UserError) as error:
        check_cluster(places, gpus, cluster)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_cluster_with_all_nodes_and_enough_gpus_passes():
    check_cluster(BOUND, {"r0": 8, "t0": 8, "t1": 4}, CLUSTER)


def test_a_node_that_ray_does_not_know_is_named_with_what_ray_start_needs():
    text = refusal(BOUND, {"t0": 8, "r0": 8}, CLUSTER[:1] + CLUSTER[2:])
    assert "node 'r0' (host a): no Ray node offers the resource 'mux_r0'" in text
    assert """`ray start ... --resources='{"mux_r0": 1}'`""" in text


def test_a_node_that_two_ray_nodes_claim_is_refused():
    assert "2 Ray nodes offer the resource 'mux_r0' (10.0.0.1, 10.0.0.1)" in refusal(BOUND, {"r0": 8}, [CLUSTER[1]] * 2)


def test_a_node_that_is_too_small_is_refused_instead_of_waited_for():
    assert "asks for 8 GPUs there, but its Ray node 10.0.0.20 offers 4" in refusal(BOUND, {"t1": 8}, CLUSTER)


def test_nodes_without_host_are_refused_where_ray_could_choose():
    places = {"r0": Place(), "t0": Place()}
    check_cluster(places, {"r0": 8, "t0": 8}, CLUSTER[:2])
    text = refusal(places, {"r0": 8, "t0": 8}, CLUSTER)
    assert "Ray has 3 nodes with GPUs (10.0.0.1, 10.0.0.3, 10.0.0.20)" in text and "no host for r0, t0" in text


def test_ranks_go_by_addresses_as_texts():
    assert in_rank_order(["t0", "t1"], BOUND, CLUSTER) == ["t1", "t0"]


def test_nodes_without_host_stay_in_the_jobs_order():
    assert in_rank_order(["t1", "t0"], {"t0": Place(), "t1": Place()}, CLUSTER) == ["t1", "t0"]


def test_a_side_with_and_without_hosts_is_refused():
    with pytest.raises(UserError, match="node 't1' has a host and node 't0' has none"):
        in_rank_order(["t0", "t1"], {**BOUND, "t0": Place()}, CLUSTER)
