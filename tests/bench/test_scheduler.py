"""The bench of decisions: what it reports, not how fast this machine is."""

from bench.scheduler import decision_latency, log_log_slope


def test_arrivals_and_departures_are_timed_apart_and_together():
    found = decision_latency(jobs=6, decisions=3)
    assert found["jobs"] == 6
    assert 0 < found["p50_ms"] <= found["p99_ms"] == max(found["arrival_p99_ms"], found["departure_p99_ms"])


def test_the_slope_of_a_power_is_its_exponent():
    assert log_log_slope([(x, 3 * x**1.5) for x in (1, 10, 100)]) == 1.5
