"""Jobs that are cut off: no call under a lease that has expired is taken, and calls that would be there are."""

from bench.protocol_model.partitions import cut_off


def test_no_call_under_an_expired_lease_maps_memory():
    found = cut_off(200, seed=1)
    assert found.partitions >= 200 and found.late_calls > 50
    assert found.accepted == 0 and not found.violations, found.seeds


def test_a_fence_that_lets_everything_pass_is_noticed():
    assert cut_off(50, seed=1, planted="token unchecked").accepted > 0
