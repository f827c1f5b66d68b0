"""Groups that are dissolved and set up again hold their nodes as before."""

import msgspec
import pytest

from tests.placement.made_jobs import make_cluster, make_job
from verl_mux.placement.groups import Groups, isolated


@pytest.mark.parametrize("closed", [frozenset(), frozenset(["rollout-0"])])
def test_a_group_that_was_taken_back_holds_its_nodes(closed):
    cluster = make_cluster(2, 2)
    before = Groups(cluster)
    (group,) = before.replace([], [isolated(make_job("a", 9, 9))])
    groups = Groups(msgspec.structs.replace(cluster, closed=closed))
    groups.adopt([group], 1)
    free = groups.free
    groups.replace([group], [])
    (again,) = groups.replace([], [group])
    assert groups.free == free
    (other,) = groups.replace([], [isolated(make_job("b", 9, 9))])
    assert set(other.rollout_nodes).isdisjoint(again.rollout_nodes)
    groups.replace([again], [])
