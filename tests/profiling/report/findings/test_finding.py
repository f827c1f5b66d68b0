"""Statistics of findings: isolated values, gaps between completions."""

import numpy as np
import pytest

from verl_mux.profiling.report.findings.finding import (
    chance,
    enough,
    expected_seconds,
    find_gap,
    in_tools,
    is_common,
    isolated,
    stalled,
)

TAME = {
    "normal": lambda rng, n: np.maximum(rng.normal(20, 4, n), 1.0),
    "uniform": lambda rng, n: rng.uniform(5, 20, n),
    "constant": lambda rng, n: np.full(n, 0.01),
}
WILD = {
    "lognormal": lambda rng, n: rng.lognormal(3, 1, n),
    "exponential": lambda rng, n: rng.exponential(20, n),
    "gamma": lambda rng, n: rng.gamma(2, 10, n),
}


@pytest.mark.parametrize("name", TAME)
@pytest.mark.parametrize("count", [64, 512, 4000])
def test_fifteen_times_the_median_stands_out_of_a_tame_distribution(name, count):
    rng = np.random.default_rng(count)
    values = TAME[name](rng, count)
    values[7] = 15 * np.median(values)
    assert list(isolated(values / np.median(values))) == [7]


@pytest.mark.parametrize("count", [256, 1024])
def test_seven_times_the_median_stands_out_of_waits_in_a_queue(count):
    rng = np.random.default_rng(count)
    for number in range(20):
        values = rng.uniform(0, 20, count) + rng.lognormal(0, 0.3, count)  # all ask at once, slots come free evenly
        values[number] = 7.5 * np.median(values)
        assert list(isolated(values / np.median(values))) == [number]


@pytest.mark.parametrize("name", [*TAME, *WILD])
def test_a_healthy_sample_holds_no_isolated_value(name):
    rng = np.random.default_rng(1)
    for _ in range(50):
        values = {**TAME, **WILD}[name](rng, 400)
        assert len(isolated(values / np.median(values))) == 0


def test_several_isolated_values_come_largest_first():
    values = np.random.default_rng(0).normal(20, 2, 500)
    values[[3, 4, 5]] = 400, 900, 600
    assert list(isolated(values / 20)) == [4, 5, 3]


def test_a_second_mode_is_no_outlier():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(20, 2, 400), rng.normal(150, 5, 100)])
    assert len(isolated(values / 20)) == 0


def test_too_few_values_say_nothing():
    assert len(isolated(np.array([1.0, 1.0, 1.0, 900.0]))) == 0


def test_expected_seconds_follow_tokens_where_they_are_known():
    tokens = np.arange(100.0, 1100.0, 10.0)
    seconds = 2.0 + 0.03 * tokens
    assert expected_seconds(seconds, tokens) == pytest.approx(seconds, rel=1e-6)
    assert set(expected_seconds(seconds, None)) == {np.median(seconds)}


def test_the_chance_of_large_values_comes_from_the_others():
    rng = np.random.default_rng(4)
    others, few = rng.lognormal(0, 0.5, 2000), rng.lognormal(0, 0.5, 64)
    assert chance(few, others) > 0.01
    assert chance(np.append(few, 9.0), others) < 1e-3
    assert chance(np.append(few, [4.5] * 4), others) < 1e-4 < chance(np.append(few, 4.5), others)


def test_values_of_another_kind_among_the_others_excuse_none():
    rng = np.random.default_rng(4)
    others = np.concatenate([rng.lognormal(-4, 0.4, 960), rng.lognormal(3, 0.2, 40)])
    assert chance(np.array([0.02, 0.02, 20.0]), others) < 1e-6


def test_too_few_others_excuse_none():
    assert chance(np.array([1.0, 2.0]), np.array([1.0, 1.1])) == 0.0


def ends(*parts):
    return np.sort(np.concatenate(parts))


BEFORE, AFTER = np.linspace(1, 25, 400), np.linspace(175, 182, 112)


def test_the_seeds_gap_is_found_to_the_second():
    gap = find_gap(0.0, ends(BEFORE, AFTER))
    assert (gap.seconds, gap.before, gap.after) == (150.0, 400, 112)


def test_an_even_stream_has_no_gap():
    assert find_gap(0.0, np.linspace(0, 100, 500)) is None


def test_the_thin_end_of_a_tail_is_no_gap():
    rng = np.random.default_rng(0)
    for _ in range(50):
        assert find_gap(0.0, np.sort(rng.lognormal(3, 0.8, 512))) is None


def test_few_stragglers_after_a_pause_are_no_gap():
    assert find_gap(0.0, ends(BEFORE, np.array([175.0, 176.0, 177.0]))) is None


def test_completions_at_one_instant_make_no_trouble():
    assert find_gap(0.0, np.full(50, 3.0)) is None
    assert find_gap(3.0, np.full(50, 3.0)) is None


def test_tokens_tell_a_stall_from_long_answers():
    gap = find_gap(0.0, ends(BEFORE, AFTER))
    finish = ends(BEFORE, AFTER)
    starts = np.zeros(512)
    long_answers = finish * 40  # tokens in proportion to time: the engine worked all along
    stood_still = np.where(finish > 100, finish - 150, finish) * 40
    assert stalled(gap, starts, finish, long_answers) is False
    assert stalled(gap, starts, finish, stood_still) is True
    assert stalled(gap, starts, finish, np.full(512, np.nan)) is None


def test_a_gap_that_others_have_too_is_how_the_work_is_made():
    gap = find_gap(0.0, ends(BEFORE, AFTER))
    assert is_common(gap, [gap, gap, None])
    assert not is_common(gap, [None, None, None])
    assert not is_common(gap, [])
    assert not is_common(gap, [gap, gap, None], part=0.7)


def test_a_gap_of_a_small_part_of_the_time_is_found_where_asked_for():
    finish = ends(np.linspace(1, 25, 100), np.linspace(30, 60, 100))
    assert find_gap(0.0, finish) is None
    assert find_gap(0.0, finish, least_missing=4.0, least_part=0.0).seconds == 5.0


def test_of_few_completions_more_must_be_missing():
    few = ends(np.linspace(1, 4, 4), np.linspace(30, 33, 4))  # 26 missing at one a second
    assert find_gap(0.0, few) is None
    assert find_gap(0.0, ends(np.linspace(1, 12, 12), np.linspace(38, 49, 12))).missing >= enough(20.0, 24)


def test_a_gap_that_requests_spent_in_tools_is_the_tools():
    gap = find_gap(0.0, ends(BEFORE, AFTER))
    finish, starts = ends(BEFORE, AFTER), np.zeros(512)
    assert in_tools(gap, starts, finish, np.where(finish > 100, 140.0, 0.0))
    assert not in_tools(gap, starts, finish, np.where(finish > 180, 140.0, 0.0))
    assert not in_tools(gap, starts, finish, np.zeros(512))
