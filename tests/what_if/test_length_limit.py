"""What a shorter max_response_length would save and cost."""

from __future__ import annotations

import pytest

from verl_mux.what_if.length_limit import LengthSample, advise


def samples(*rows: tuple[int, float, float, int]) -> list[LengthSample]:
    return [LengthSample(*row) for row in rows]


def test_a_tail_that_earns_nothing_is_cut_off():
    given = samples(*[(300, 1.0, 3.0, s) for s in range(9)], *[(1000, 0.0, 10.0, s) for s in range(9)])
    advice = advise(given, [200, 600, 1000])
    assert advice.recommended == 600
    by_limit = {c.max_response_length: c for c in advice.candidates}
    assert by_limit[600].step_time == pytest.approx(0.4)
    assert by_limit[600].time == pytest.approx(4 / 13)
    assert by_limit[600].responses == pytest.approx(0.5)
    assert by_limit[600].reward == 0
    assert by_limit[200].reward == 1


def test_a_tail_that_earns_its_reward_stays():
    advice = advise(samples((300, 0.0, 3.0, 0), (1000, 1.0, 10.0, 0)), [600, 1000])
    assert advice.recommended is None
    assert advice.candidates[0].reward == 1


def test_a_step_is_as_long_as_its_slowest_response():
    advice = advise(samples((100, 1.0, 10.0, 0), (100, 1.0, 1.0, 0), (200, 0.0, 2.0, 0)), [100])
    assert advice.candidates[0].step_time == 0
    assert advice.candidates[0].time == pytest.approx(1 / 13)


def test_negative_rewards_count_from_the_worst():
    advice = advise(samples((100, -1.0, 1.0, 0), (100, 0.0, 1.0, 0), (900, -0.5, 9.0, 0)), [100])
    assert advice.candidates[0].reward == pytest.approx(0.5 / 1.5)


def test_without_candidates_quantiles_are_tried_and_equal_rewards_put_nothing_at_stake():
    advice = advise([LengthSample(100 + 10 * i, 0.0, 1.0 + i) for i in range(100)])
    limits = [c.max_response_length for c in advice.candidates]
    assert limits == sorted(set(limits))
    assert all(limit % 64 == 0 for limit in limits)
    assert advice.recommended == limits[0]
    assert advice.as_dict()["recommended"] == limits[0]


def test_nothing_to_go_by_is_refused():
    with pytest.raises(ValueError, match="at least one response"):
        advise([])
