"""The measurement of hand-overs runs; what it finds is no test's business."""

from bench.leases import grant_latency


def test_hand_overs_are_timed_one_by_one():
    found = grant_latency(rounds=4)
    assert found["rounds"] == 4
    assert found["median_us"] > 0
    assert found["p99_us"] >= found["median_us"] and found["fsync_p99_us"] >= found["fsync_median_us"] > 0
