"""Any Python process as a filler: one side, no steps, and a lease that says when it is wanted."""

import threading

import pytest

from verl_mux.coordinator.bus.connect import connect
from verl_mux.errors import UserError

TRAIN = {"train": ["train"]}


def test_a_training_loop_runs_between_the_phases_of_a_job(serve, join, event_log, eventually):
    coordinator = serve()
    job, filler = join(coordinator, "job"), join(coordinator, "sums", TRAIN, filler=True)
    with filler.phase("train") as lease:
        assert (lease.nodes, lease.step, lease.wanted.is_set()) == (["t0"], 0, False)
        asking = threading.Thread(target=lambda: job.release(job.acquire("train", step=1)))
        asking.start()
        assert lease.wanted.wait(60)
    asking.join(60)
    with filler.phase("train") as again:
        assert again.token > lease.token and not again.wanted.is_set()
    left = [extra["leaving_s"] for _, _, extra, _ in event_log.of("lease_held") if extra.get("filler")]
    assert left[0] >= 0 and left[1] is None


def test_a_lease_may_be_asked_for_with_a_number_of_nodes(serve, join):
    filler = join(serve(), "batch", {"rollout": ["rollout"]}, filler=True)
    with filler.phase("rollout", num_nodes=2) as lease:
        assert sorted(lease.nodes) == ["r0", "r1"]
    with pytest.raises(UserError, match="any 3 of 2 nodes"), filler.phase("rollout", num_nodes=3):
        pass


def test_a_lease_that_is_gone_is_wanted_too(serve, join):
    """Whoever looks at `wanted` only must not go on for ever when the coordinator is gone: the lease may not be used then."""
    coordinator = serve(lease_timeout=2)
    filler = join(coordinator, "sums", TRAIN, filler=True, timeout=1.0)
    lease = filler.acquire("train")
    coordinator.stop()
    assert lease.wanted.wait(60)


def test_without_a_coordinator_a_filler_gets_what_it_asks_for():
    filler = connect(None, "sums", {"train": ["t0", "t1"]}, filler=True)
    with filler.phase("train") as lease:
        assert lease.nodes == ["t0"] and lease.step == 0 and not lease.wanted.is_set()
