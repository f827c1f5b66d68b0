"""Simulated engines against sums done by hand."""

import pytest

from verl_mux.what_if.engines import Engines, Speed

SPEED = Speed(base=0.01, each=0.002, batch=0.1, prefill=0.001)


def ends(engines):
    found = []
    while (ended := engines.next_before(float("inf"))) is not None:
        found.append((ended.name[1], ended.at))
    return found


def test_one_request_takes_its_prefill_and_its_tokens():
    engines = Engines(SPEED, replicas=1, slots=8)
    engines.submit(("g", 0), read=50, tokens=100)
    assert ends(engines) == [(0, pytest.approx(0.1 + 0.05 + 100 * 0.012))]


def test_two_at_once_slow_each_other_until_one_ends():
    engines = Engines(SPEED, replicas=1, slots=8)
    engines.submit(("g", 0), read=0, tokens=10)
    engines.submit(("g", 1), read=0, tokens=30)
    assert ends(engines) == [(0, pytest.approx(0.1 + 10 * 0.014)), (1, pytest.approx(0.1 + 10 * 0.014 + 20 * 0.012))]


def test_what_finds_no_slot_waits_for_one():
    engines = Engines(SPEED, replicas=1, slots=1)
    for number in range(2):
        engines.submit(("g", number), read=0, tokens=10)
    first, second = (at for _, at in ends(engines))
    assert second == pytest.approx(first + 0.1 + 10 * 0.012)


def test_the_least_loaded_replica_gets_the_next():
    engines = Engines(SPEED, replicas=2, slots=8)
    for number in range(2):
        engines.submit(("g", number), read=0, tokens=10)
    assert [at for _, at in ends(engines)] == [pytest.approx(0.1 + 10 * 0.012)] * 2


def test_an_abort_gives_the_tokens_so_far_and_frees_the_slot():
    engines = Engines(SPEED, replicas=1, slots=1)
    engines.submit(("g", 0), read=0, tokens=1000)
    engines.submit(("g", 1), read=0, tokens=1)
    engines.now = 0.1 + 50 * 0.012
    assert engines.abort(("g", 0)) == 50
    assert [number for number, _ in ends(engines)] == [1]
