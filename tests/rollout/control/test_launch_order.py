"""Who is launched first, from lengths learnt on the way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.rollouts.predictor import simulate
from verl_mux.rollout.control.launch_order import ORDERS, LaunchOrder, prompts_of, turns
from verl_mux.rollout.lengths.predictors import Prompt, make_predictor

PROMPTS = [Prompt(str(i), f"task {i}") for i in range(4)]
UIDS = [f"u{i}" for i in range(4)]
LENGTHS = {"u0": [50, 60], "u1": [10, 12], "u2": [400], "u3": [90]}


def learnt(order: str) -> LaunchOrder:
    it = LaunchOrder(order, make_predictor("history"))
    it.place(UIDS, PROMPTS)
    it.observe(LENGTHS, epoch=0)
    if it._fit is not None:
        it._fit.join()
    return it


def test_shortest_first():
    again = [f"v{i}" for i in range(4)]
    assert learnt("sjf").place(again, PROMPTS).tolist() == [1, 0, 3, 2]
    assert learnt("fifo").place(again, PROMPTS).tolist() == [0, 1, 2, 3]


def test_lengths_of_prompts_it_never_placed_are_ignored():
    it = LaunchOrder("sjf", make_predictor("history"))
    it.observe({"stranger": [5]}, epoch=0)
    assert it._fit is None
    assert it.place(UIDS, PROMPTS).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ["fifo", "sjf"])
def test_weeks_of_steps_leave_nothing_behind(order):
    """Neither of prompts that were trained nor of those that were dropped."""
    it = LaunchOrder(order, make_predictor("history"))
    for step in range(5):
        uids = [f"{step}/{uid}" for uid in UIDS]
        it.place(uids, PROMPTS)
        it.observe({uid: [50] for uid in uids[:3]}, epoch=0)
        it.forget(uids[3:])
        if it._fit is not None:
            it._fit.join()
    assert it._prompts == {}
    assert not it._unread or order != "fifo"


def test_a_prompt_is_known_by_its_index_and_by_its_text_where_there_is_none():
    batch = {"uid": ["u0"], "raw_prompt": [[{"role": "user", "content": "2+2"}]]}
    assert prompts_of({**batch, "index": [7]}) == [Prompt("7", "2+2")]
    assert prompts_of(batch) == prompts_of({**batch, "index": [None]}) == [Prompt("2+2", "2+2")]
    assert prompts_of({"uid": ["u0"], "index": [7]}) == [Prompt("7", "")]


SCORES = np.array([5.0, 1.0, 9.0, 3.0])


@pytest.mark.parametrize(("order", "expected"), [("fifo", [0, 1, 2, 3]), ("sjf", [2, 0, 3, 1]), ("ljf", [1, 3, 0, 2])])
def test_orders_by_score_and_ties_by_arrival(order, expected):
    assert turns(order, SCORES).tolist() == expected
    assert turns(order, np.array([2.0, 2.0])).tolist() == [0, 1]


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
