"""What more nodes would change, asked of the placer itself."""

import msgspec
import pytest

from tests.placement.made_jobs import make_cluster, make_job
from tests.placement.placer.two_pairs import clusters, on_both
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.model import COLOCATED
from verl_mux.placement.placer import Placer
from verl_mux.placement.pool_pairs import PoolPairs, Queued, Record, by_price
from verl_mux.placement.rules import LIVE
from verl_mux.placement.shortage import More, Want, wants

PLENTY = More(8, 300.0)
RULES = msgspec.structs.replace(LIVE, keep=0.0)


def lacking(placer, rollout=PLENTY, train=PLENTY, progress=None, now=0.0, held=frozenset(), moves=True):
    waiting = tuple(Queued(job, passed) for job, passed in placer.waiting.entries)
    record = Record(groups=tuple(placer.groups.values()), waiting=waiting, named=placer.groups.named)
    pairs = PoolPairs({"rollout+train": placer.cluster}, placer.rules, record, frozenset())
    pairs.held = held
    return wants(pairs, {"rollout": rollout, "train": train}, progress or {}, now, moves)


def placed(*jobs, cluster=None):
    placer = Placer(cluster or make_cluster(1, 1), RULES)
    for job in jobs:
        placer.admit(job)
    return placer


def standing(*names, hours=10.0):
    return {name: Progress(age_s=hours * 3600, done=100, phase="rollout", waited_s=0.0) for name in names}


def test_nobody_who_waits_lacks_nothing():
    assert lacking(placed(make_job("a", 100, 100, slo=1.0))) == []


def test_who_waits_lacks_what_he_would_start_on():
    alone = [make_job(name, 100, 10, slo=1.0) for name in "abc"]
    placer = placed(*alone)
    assert len(placer.waiting) == 2
    found = lacking(placer)
    assert found == [Want("b", "starts", {"rollout": 1}), Want("c", "starts", {"rollout": 1})]
    assert placer.waiting.jobs == alone[1:], "nothing has changed"


def test_of_two_who_would_share_new_nodes_the_first_lacks_them():
    full = make_job("full", 300, 10, slo=1.0, train_memory_gb=900)
    placer = placed(full, *(make_job(name, 100, 100, slo=1.2, train_memory_gb=400) for name in "ab"))
    assert len(placer.waiting) == 2
    assert lacking(placer) == [Want("a", "starts", {"rollout": 1, "train": 1})]


def test_a_colocated_job_lacks_training_nodes_alone():
    placer = placed(*(make_job(name, 100, 100, slo=1.0, modes=(COLOCATED,)) for name in "ab"))
    assert lacking(placer) == [Want("b", "starts", {"train": 1})]


@pytest.mark.parametrize(("longer", "pool"), [(1.0, "old"), (3.0, "new")])
def test_of_several_pools_grows_the_one_where_the_work_costs_the_least(longer, pool):
    pairs = PoolPairs(clusters(old=1, new=1, train=1), RULES, Record(), frozenset())
    for name in "ab":
        specs = on_both(make_job(name, 50, 100, slo=1.0), longer)
        pairs.admit(specs, by_price(specs, pairs.ways(specs, 8)), {})
    more = {name: More(1, 0.0) for name in ("old", "new", "train")}
    assert wants(pairs, more, {}, 0.0) == [Want("b", "starts", {pool: 1, "train": 1})]
    without = {**more, pool: More(0, 0.0)}
    assert wants(pairs, without, {}, 0.0) == [Want("b", "starts", {"train": 1})], "beside the free node of the other one"
    assert [entry.job.name for entry in pairs.waiting] == ["b"], "nothing has changed"


def test_what_a_pool_may_not_get_is_not_lacking():
    wide = make_job("b", 300, 30, slo=1.0, rollout_nodes=2)
    placer = placed(make_job("a", 300, 30, slo=1.0), make_job("c", 300, 30, slo=1.0), wide, cluster=make_cluster(2, 3))
    assert lacking(placer, rollout=More(1, 0.0)) == []
    assert lacking(placer, rollout=More(2, 0.0))[0].nodes["rollout"] == 2


def crowded():
    """Two jobs take turns on a rollout node that one of them would keep busy, as there was no second one."""
    cluster = make_cluster(1, 2)
    placer = placed(
        make_job("a", 180, 20, slo=2.0, cold_start_s=60.0), make_job("b", 180, 20, slo=2.0, cold_start_s=60.0), cluster=cluster
    )
    assert len(placer.groups) == 1
    return placer


def test_who_is_placed_badly_lacks_what_makes_the_same_work_cheaper():
    (want,) = lacking(crowded(), progress=standing("a", "b"))
    assert (want.why, want.nodes) == ("costs less", {"rollout": 1}) and want.saves_usd_per_hour > 0


@pytest.mark.parametrize("keys", [{"moves": False}, {"held": frozenset("ab")}])
def test_nobody_is_looked_at_who_may_not_move(keys):
    assert lacking(crowded(), progress=standing("a", "b"), **keys) == []


def test_a_move_that_does_not_pay_for_its_wait_wants_nothing():
    slow = More(8, 1e6)
    assert lacking(crowded(), slow, slow, progress=standing("a", "b")) == []
    assert lacking(crowded(), progress=standing("a", "b", hours=0.01)) == []
