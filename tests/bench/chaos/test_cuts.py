from bench.chaos import cuts


def test_a_node_is_given_on_when_nothing_of_the_job_that_was_cut_off_is_left():
    found = cuts.measure(2)  # in the second the job cannot give way by itself
    assert (found["cuts"], found["outlived"]) == (2, 0)
    assert found["after_lease_s"]["median"] > -1.5  # never before the job may have believed its lease
