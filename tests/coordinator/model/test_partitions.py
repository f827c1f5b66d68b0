"""Jobs that are cut off: no call under a lease that has expired is taken, and calls that would be there are."""

from bench.protocol_model.schedules import cut_off


def test_no_call_under_an_expired_lease_maps_memory():
    found = cut_off(200, seed=1)
    assert found.faults["network cut"] >= 200 and found.faults["stale calls"] > 50
    assert not found.violations, found.again


def test_a_fence_that_lets_everything_pass_is_noticed():
    assert cut_off(50, seed=1, planted="token unchecked").violations["mapped after expiry"] > 0
