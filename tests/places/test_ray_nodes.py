"""Whether what works for a node runs where the node is; what a Ray cluster must offer; the order in which verl numbers ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
from verl_mux.errors import UserError
from verl_mux.places.place import Location, Place, check, is_host, mismatch
from verl_mux.places.ray_nodes import RayNode, check_cluster, check_own, in_rank_order, ray_node_of

AT = Location("gpu-07.cluster.example", ("10.0.0.7", "fd00::7"), ("2", "3"))


def test_a_host_goes_by_its_name_with_or_without_domain_and_by_its_addresses():
    names = ["gpu-07.cluster.example", "gpu-07", "GPU-07", "10.0.0.7", "fd00::7"]
    assert [name for name in [*names, "gpu-07.other.example", "gpu-0", "10.0.0.70"] if is_host(name, AT)] == names
    assert is_host("gpu-07.cluster.example", Location("gpu-07"))  # the host knows itself without its domain


def test_what_runs_on_its_node_is_right_and_a_node_without_host_binds_nothing():
    places = [Place(), Place(cpus=[5]), *(Place(host="gpu-07", gpu_ids=ids) for ids in (None, [2, 3], [0, 1, 2, 3]))]
    assert [mismatch("rank 0", "t0", place, AT) for place in places] == [None] * 5
    # Without GPUs only hosts are compared.
    assert mismatch("rank 0", "t0", Place(host="gpu-07", gpu_ids=[0]), Location("gpu-07")) is None


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(host="gpu-08"), "node 't0' (host gpu-08), but runs on gpu-07.cluster.example (10.0.0.7, fd00::7) with GPUs 2, 3"),
        (Place(host="gpu-07", gpu_ids=[0, 1]), "node 't0' (host gpu-07, GPUs 0, 1), but runs on"),
        # One of its two GPUs is another node's.
        (Place(host="gpu-07", gpu_ids=[3]), "node 't0' (host gpu-07, GPUs 3), but runs on"),
    ],
)
def test_a_mismatch_names_the_node_its_place_the_process_and_where_that_runs(place, words):
    assert f"training rank 0 works for {words}" in mismatch("training rank 0", "t0", place, AT)


def test_a_gpu_that_goes_by_another_name_than_a_number_is_not_taken_for_the_right_one():
    assert mismatch("rank 0", "t0", Place(host="h", gpu_ids=[0]), Location("h", (), ("GPU-5ac6",)))


def test_all_that_run_elsewhere_are_named_in_one_line():
    places = {"t0": Place(host="a"), "t1": Place(host="b")}
    check([("rank 0", "t0", Location("a")), ("rank 1", "t1", Location("b")), ("rank 2", "unknown", Location("c"))], places)
    with pytest.raises(UserError) as error:
        check([("rank 0", "t0", Location("b")), ("rank 1", "t1", Location("a"))], places)
    text = str(error.value)
    assert "rank 0 works for node 't0'" in text and "rank 1 works for node 't1'" in text and "\n" not in text


# ---------------------------------------------------------------- nodes of a Ray cluster


BOUND = {"r0": Place(host="a"), "t0": Place(host="b"), "t1": Place(host="c")}
CLUSTER = [
    RayNode("10.0.0.9", 0),  # a head without GPU
    RayNode("10.0.0.1", 8, {"GPU": 8, "mux_r0": 1}),
    RayNode("10.0.0.3", 8, {"GPU": 8, "mux_t0": 1}),
    RayNode("10.0.0.20", 4, {"GPU": 4, "mux_t1": 1}),
]


FREE = {"r0": Place(), "t0": Place()}


def test_a_cluster_with_all_nodes_and_enough_gpus_passes():
    check_cluster(BOUND, {"r0": 8, "t0": 8, "t1": 4}, CLUSTER)
    check_cluster(FREE, {"r0": 4, "t0": 4}, CLUSTER[:2])


def test_without_a_resource_of_its_own_a_node_is_the_ray_node_on_its_host():
    cluster = [RayNode("10.0.0.8", 8, host="a.example"), RayNode("10.0.0.9", 8), *CLUSTER[2:]]
    places = {"r0": Place(host="a", gpu_ids=[0, 1]), "r1": Place(host="a", gpu_ids=[2, 3]), "t0": Place(host="10.0.0.9"),
              "t1": BOUND["t1"]}  # fmt: skip
    check_cluster(places, {"r0": 2, "r1": 2, "t0": 8}, [cluster[0], cluster[1]])
    assert [ray_node_of(node, place, cluster).address for node, place in places.items()] == [
        "10.0.0.8", "10.0.0.8", "10.0.0.3", "10.0.0.20",
    ]  # fmt: skip
    # Its resource comes before its address.
    assert in_rank_order(["t1", "r1", "r0"], places, cluster) == ["t1", "r1", "r0"]


@pytest.mark.parametrize(
    ("places", "gpus", "cluster", "words"),
    [
        (BOUND, {"t0": 8, "r0": 8}, CLUSTER[:1] + CLUSTER[2:], "no Ray node is on that host or offers the resource 'mux_r0'"),
        (BOUND, {"r0": 8}, CLUSTER[:1], """`ray start ... --resources='{"mux_r0": 1}'`"""),
        (BOUND, {"r0": 8}, [CLUSTER[1]] * 2, "2 Ray nodes offer the resource 'mux_r0' (10.0.0.1, 10.0.0.1)"),
        # Too small: not waited for.
        (BOUND, {"t1": 8}, CLUSTER, "asks for 8 GPUs there, but its Ray node 10.0.0.20 offers 4"),
        # Ray could choose.
        (FREE, {"r0": 8, "t0": 8}, CLUSTER, "Ray has 3 nodes with GPUs (10.0.0.1, 10.0.0.3, 10.0.0.20)"),
        (FREE, {"r0": 8, "t0": 8}, CLUSTER, "no host for r0, t0"),
        # Nothing would end the wait.
        (FREE, {"r0": 4, "t0": 8}, CLUSTER[:2], "the job asks Ray for 12 GPUs, and 8 are free"),
        (FREE, {"r0": 4, "t0": 4}, [RayNode("10.0.0.1", 8, taken=1)], "give r0, t0 a `host`"),
        # One of verl's own modes would be on the same GPUs.
        (BOUND, {"r0": 4}, [RayNode("10.0.0.1", 8, {"mux_r0": 1}, taken=4)], "Ray has given 4 GPUs of its Ray node 10.0.0.1 to"),
        (BOUND, {"r0": 4}, [RayNode("10.0.0.1", 8, host="a")] * 2, "2 Ray nodes are on that host (10.0.0.1, 10.0.0.1)"),
    ],
)
def test_a_cluster_on_which_ray_would_not_do_as_asked_is_refused(places, gpus, cluster, words):
    with pytest.raises(UserError) as error:
        check_cluster(places, gpus, cluster)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_gpus_of_ones_own_are_none_that_a_lease_gives_to_others(monkeypatch):
    both = RayNode("10.0.0.7", 8, {"mux_own": 1, "mux_r0": 1})
    with pytest.raises(UserError, match="10.0.0.7 offers mux_own and mux_r0, whose GPUs leases cover"):
        check_own(2, True, [*CLUSTER, both])
    check_own(2, True, [*CLUSTER, RayNode("10.0.0.7", 2, {"mux_own": 1})])
    with pytest.raises(UserError, match="asks for 2 GPUs of its own, and Ray has 1"):
        check_own(2, True, [*CLUSTER, RayNode("10.0.0.7", 2, {"mux_own": 1}, taken=1)])
    for device in ("cpu", "cuda"):
        monkeypatch.setattr("verl_mux.places.ray_nodes.get_platform", lambda device=device: SimpleNamespace(device_name=device))
        if device == "cpu":
            check_own(2, False, CLUSTER[:2])
    with pytest.raises(UserError, match="gives its nodes no host"):
        check_own(2, False, CLUSTER[:2])


def test_ranks_go_by_addresses_as_texts_and_nodes_without_host_stay_in_the_jobs_order():
    assert in_rank_order(["t0", "t1"], BOUND, CLUSTER) == ["t1", "t0"]
    assert in_rank_order(["t1", "t0"], {"t0": Place(), "t1": Place()}, CLUSTER) == ["t1", "t0"]
    with pytest.raises(UserError, match="node 't1' has a host and node 't0' has none"):
        in_rank_order(["t0", "t1"], {**BOUND, "t0": Place()}, CLUSTER)
