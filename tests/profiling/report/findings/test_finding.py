"""Statistics of findings: isolated values."""

import numpy as np
import pytest

from verl_mux.profiling.report.findings.finding import (
    chance,
    expected_seconds,
    isolated,
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
