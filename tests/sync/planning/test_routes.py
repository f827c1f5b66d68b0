"""From who meets to who has which part."""

import pytest

from verl_mux.sync.planning.plan import make_plan
from verl_mux.sync.planning.routes import Meeting, parts, topology_of
from verl_mux.sync.planning.topology import Links


def meetings(hosts: int, each: int, cluster: str) -> list[Meeting]:
    return [
        Meeting(("10.0.0.1", 1), f"{cluster}{host}/{at}", f"{cluster}{host}", f"{cluster}{host}", cluster)
        for host in range(hosts)
        for at in range(each)
    ]


@pytest.mark.parametrize("method", ["two_stage", "relay", "root", "chain"])
def test_large_clusters_have_routes(method):
    trainers, workers = meetings(8, 8, "train"), meetings(80, 8, "rollout")
    topology = topology_of(trainers, workers, Links())
    senders, receivers = parts(make_plan(method, topology), topology, trainers, workers)
    roles = [it.role for it in receivers if it.role is not None]
    assert all(role.sources == list(range(len(trainers))) for role in roles)
    assert sum(len(role.upstream) for role in roles) == sum(len(it.targets) for it in senders) + sum(
        len(role.downstream) for role in roles
    )
