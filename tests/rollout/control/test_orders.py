"""Orders, and what an order costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.rollouts.predictor import simulate
from verl_mux.rollout.control.launch_order import ORDERS, turns

SCORES = np.array([5.0, 1.0, 9.0, 3.0])


@pytest.mark.parametrize(("order", "expected"), [("fifo", [0, 1, 2, 3]), ("sjf", [2, 0, 3, 1]), ("ljf", [1, 3, 0, 2])])
def test_orders_by_score(order, expected):
    assert turns(order, SCORES).tolist() == expected


def test_ties_keep_their_order_of_arrival():
    assert turns("sjf", np.array([2.0, 1.0, 2.0, 1.0])).tolist() == [2, 0, 3, 1]


@given(st.sampled_from(ORDERS), st.lists(st.floats(-1e9, 1e9), max_size=30))
def test_every_prompt_has_its_own_turn(order, scores):
    assert sorted(turns(order, np.array(scores, dtype=float)).tolist()) == list(range(len(scores)))


def test_simulation_hands_the_next_request_to_the_first_free_slot():
    lengths = [4.0, 1.0, 1.0, 4.0]
    assert simulate(lengths, np.arange(4), slots=2) == ((4 + 1 + 2 + 6) / 4, 6.0)
    assert simulate(lengths, turns("sjf", np.array(lengths)), slots=2) == ((1 + 1 + 5 + 5) / 4, 5.0)


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="fifo, sjf, ljf"):
        turns("lifo", SCORES)
