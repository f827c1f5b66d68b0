from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from verl_mux.sync.route import Endpoint, plan_routes


def workers(*sizes: int) -> list[Endpoint]:
    """Clusters c0, c1, ... of these sizes; worker `w<cluster>.<i>` takes hand-ons at `h<cluster>.<i>`."""
    return [Endpoint(f"w{c}.{i}", f"h{c}.{i}", f"c{c}") for c, size in enumerate(sizes) for i in range(size)]


@pytest.mark.parametrize(
    ("ranks", "sizes", "entry", "peers"),
    [
        (1, [1], [["w0.0"]], [[]]),
        (1, [2], [["w0.0"]], [["h0.1"], ["h0.0"]]),
        (2, [1], [["w0.0"], ["w0.0"]], [[]]),
        (2, [2], [["w0.0"], ["w0.1"]], [["h0.1"], ["h0.0"]]),
        (3, [2], [["w0.0"], ["w0.1"], ["w0.0"]], [["h0.1"], ["h0.0"]]),
        (2, [1, 2], [["w0.0", "w1.0"], ["w0.0", "w1.1"]], [[], ["h1.1"], ["h1.0"]]),
    ],
)
def test_each_rank_sends_to_one_worker_of_each_cluster(ranks, sizes, entry, peers):
    routes = plan_routes(ranks, workers(*sizes))
    assert (routes.entry, routes.peers) == (entry, peers)


@given(ranks=st.integers(1, 20), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), order=st.randoms())
def test_one_copy_goes_to_each_cluster_and_every_worker_gets_every_ranks_part_once(ranks, sizes, order):
    members = workers(*sizes)
    order.shuffle(members)
    routes = plan_routes(ranks, members)
    by_handoff = {m.handoff: m for m in members}
    got = Counter()
    for rank, entry in enumerate(routes.entry):
        crossed = [next(m for m in members if m.address == address) for address in entry]
        assert sorted(m.cluster for m in crossed) == sorted({m.cluster for m in members})
        for worker in crossed:
            got[worker.address, rank] += 1
            for peer in routes.peers[members.index(worker)]:
                assert by_handoff[peer].cluster == worker.cluster
                got[by_handoff[peer].address, rank] += 1
    assert got == {(m.address, rank): 1 for m in members for rank in range(ranks)}


@given(ranks=st.integers(1, 20), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_the_ranks_are_spread_evenly_over_a_clusters_workers(ranks, sizes):
    routes = plan_routes(ranks, workers(*sizes))
    streams = Counter(address for entry in routes.entry for address in entry)
    for cluster, size in enumerate(sizes):
        loads = [streams[f"w{cluster}.{i}"] for i in range(size)]
        assert max(loads) - min(loads) <= 1
