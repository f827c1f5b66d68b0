"""Gaps: only where completions are missing at the pace of both sides, and only if the engine stood still."""

import numpy as np

from verl_mux.profiling.report.findings.finding import enough, find_gap, in_tools, is_common, stalled


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
