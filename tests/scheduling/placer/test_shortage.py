"""What more nodes would change, asked of the placer itself."""

import msgspec
import pytest

from tests.scheduling.made_jobs import make_cluster, make_job
from verl_mux.scheduling.placer.placer import Placer
from verl_mux.scheduling.placer.record import Queued, Record
from verl_mux.scheduling.placer.shortage import More, Want, wants
from verl_mux.scheduling.search.rules import LIVE
from verl_mux.scheduling.time.forecast import Progress

PLENTY = More(8, 300.0)
RULES = msgspec.structs.replace(LIVE, keep=0.0)


def record_of(placer):
    waiting = tuple(Queued(job, passed) for job, passed in placer.waiting.entries)
    return Record(groups=tuple(placer.groups.values()), waiting=waiting, named=placer.groups.named)


def lacking(placer, more=(PLENTY, PLENTY), progress=None, now=0.0, **keys):
    return wants(record_of(placer), placer.cluster, placer.rules, more, progress or {}, now, **keys)


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
    assert [(want.job, want.why, want.rollout) for want in found] == [("b", "starts", 1), ("c", "starts", 1)]
    assert placer.waiting.jobs == alone[1:], "nothing has changed"


def test_of_two_who_would_share_new_nodes_the_first_lacks_them():
    full = make_job("full", 300, 10, slo=1.0, train_memory_gb=900)
    placer = placed(full, *(make_job(name, 100, 100, slo=1.2, train_memory_gb=400) for name in "ab"))
    assert len(placer.waiting) == 2
    assert lacking(placer) == [Want("a", "starts", 1, 1)]


def test_what_a_pool_may_not_get_is_not_lacking():
    wide = make_job("b", 300, 30, slo=1.0, rollout_nodes=2)
    placer = placed(make_job("a", 300, 30, slo=1.0), make_job("c", 300, 30, slo=1.0), wide, cluster=make_cluster(2, 3))
    assert lacking(placer, more=(More(1, 0.0), PLENTY)) == []
    assert lacking(placer, more=(More(2, 0.0), PLENTY))[0].rollout == 2


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
    assert (want.why, want.rollout) == ("costs less", 1) and want.saves_usd_per_hour > 0


@pytest.mark.parametrize("keys", [{"moves": False}, {"held": frozenset("ab")}])
def test_nobody_is_looked_at_who_may_not_move(keys):
    assert lacking(crowded(), progress=standing("a", "b"), **keys) == []


def test_a_move_that_does_not_pay_for_its_wait_wants_nothing():
    slow = (More(8, 1e6), More(8, 1e6))
    assert lacking(crowded(), more=slow, progress=standing("a", "b")) == []
    assert lacking(crowded(), progress=standing("a", "b", hours=0.01)) == []
