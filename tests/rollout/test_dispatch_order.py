"""Orders, ageing, and what an order costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mux.rollout.dispatch_order import ORDERS, default_order, ranks, simulate

SCORES = np.array([5.0, 1.0, 9.0, 3.0])
FRESH = np.zeros(4)


@pytest.mark.parametrize(("order", "turns"), [("fifo", [0, 1, 2, 3]), ("sjf", [2, 0, 3, 1]), ("ljf", [1, 3, 0, 2])])
def test_orders_by_score(order, turns):
    assert ranks(order, SCORES, FRESH).tolist() == turns


def test_ties_keep_their_order_of_arrival():
    assert ranks("sjf", np.array([2.0, 1.0, 2.0, 1.0]), FRESH).tolist() == [2, 0, 3, 1]


def test_a_prompt_that_waited_long_enough_goes_before_every_newcomer():
    assert ranks("sjf", SCORES, np.array([0, 0, 10, 0]), age_weight=0.1)[2] == 0
    assert ranks("sjf", SCORES, np.array([0, 0, 10, 0]), age_weight=0.0)[2] == 3


@given(st.sampled_from(ORDERS), st.lists(st.tuples(st.floats(-1e9, 1e9), st.integers(0, 50)), max_size=30))
def test_every_prompt_has_its_own_turn(order, rows):
    scores, waited = (np.array([row[i] for row in rows], dtype=float) for i in (0, 1))
    assert sorted(ranks(order, scores, waited).tolist()) == list(range(len(rows)))


def test_barrier_modes_want_the_longest_first_and_streams_and_aborts_the_shortest():
    assert default_order("sync", aborts_tail=False) == "ljf"
    assert default_order("mux_colocate", aborts_tail=False) == "ljf"
    assert default_order("mux_colocate", aborts_tail=True) == "sjf"
    assert default_order("separate_async", aborts_tail=False) == "sjf"
    assert default_order("something_else", aborts_tail=False) == "fifo"


def test_simulation_hands_the_next_request_to_the_first_free_slot():
    lengths = [4.0, 1.0, 1.0, 4.0]
    assert simulate(lengths, np.arange(4), slots=2) == ((4 + 1 + 2 + 6) / 4, 6.0)
    assert simulate(lengths, ranks("sjf", np.array(lengths), FRESH), slots=2) == ((1 + 1 + 5 + 5) / 4, 5.0)


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="fifo, sjf, ljf"):
        ranks("lifo", SCORES, FRESH)
