"""A stay's name goes to the engine and back, and no name is the beginning of another one."""

from __future__ import annotations

from verl_mux.rollout.engine.stay import Stay, keys_of, stay_of


def test_a_name_says_whose_stay_it_is():
    stay = Stay("0f3c/odd_2", 12, 3, 4)
    assert stay_of(stay.new_name()) == stay
    assert keys_of(stay.new_name()) == {"request_id": "0f3c/odd_2", "turn": 3, "stay": 4}


def test_names_of_others_stay_what_they_are():
    for name in ("45bb6a77", "a/b/c/d/e", ""):
        assert stay_of(name) is None and keys_of(name) == {"request_id": name}


def test_an_abort_of_one_stay_takes_no_other():
    names = [Stay("a_1", 1, turn, stay).new_name() for turn in (1, 11) for stay in (1, 11)] + [Stay("a_1", 1, 1, 1).new_name()]
    assert not any(one.startswith(other) for one in names for other in names if one is not other)
