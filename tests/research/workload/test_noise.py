"""Jobs that say how long they run, truly or not."""

import pytest

from research.workload.varying import with_said_lengths
from research.workload.workload import Arrival
from tests.placement.made_jobs import make_job

ARRIVALS = [Arrival(make_job(f"j{i}", 60, 40), 60.0 * i, 100) for i in range(2000)]


@pytest.mark.parametrize("stop_early", [0.0, 0.3, 1.0])
def test_jobs_that_end_early_had_said_more_and_end_anywhere_on_the_way(stop_early):
    said = with_said_lengths(ARRIVALS, stop_early, seed=1)
    assert all(each.says >= each.iterations for each in said)
    early = [each.iterations / each.says for each in said if each.says > each.iterations]
    assert len(early) / len(said) == pytest.approx(stop_early, abs=0.03)
    if early:
        assert sum(early) / len(early) == pytest.approx(0.5, abs=0.03)


def test_what_is_left_is_what_was_said_without_what_is_done():
    (one, *_), (other, *_) = (with_said_lengths(ARRIVALS[:1], 0.0, seed) for seed in (1, 2))
    assert one == other and (one.says_left(0), one.says_left(97), one.says_left(120)) == (100, 3, 0)
    assert ARRIVALS[0].says_left(5) is None
