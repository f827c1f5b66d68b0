"""The ratio that the run's summary and the report tell."""

from verl_mux.profiling.plain.intervals import throughput_ratio


def test_two_equal_jobs_that_hide_each_other_completely_are_twice_as_fast():
    assert throughput_ratio({"a": 10.0, "b": 10.0}, {"a": 10.0, "b": 10.0}) == 2.0
    assert throughput_ratio({"a": 10.0, "b": 10.0}, {"a": 20.0, "b": 20.0}) == 1.0
    assert throughput_ratio({"a": 10.0, "b": None}, {"a": 10.0, "b": 10.0}) is None
    assert throughput_ratio({}, {}) is None
