"""Sets of time."""

import hypothesis.strategies as st
from hypothesis import given

from verl_mux.profiling.plain.intervals import clip, length, overlap, union


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda t: (t[0], t[0] + t[1])), max_size=12))
def test_the_union_counts_every_second_once(spans):
    assert length(spans) == len({second for start, end in spans for second in range(start, end)})


def test_intervals():
    assert union([(3, 4), (0, 1), (0.5, 2), (5, 5), (7, 6)]) == [(0, 2), (3, 4)]
    assert length([(0, 2), (1, 3)]) == 3
    assert clip([(0, 2), (5, 9)], (1, 6)) == [(1, 2), (5, 6)]
    assert overlap((0, 1), (2, 3)) == 0
    assert overlap((0, 2), (1, 5)) == 1
