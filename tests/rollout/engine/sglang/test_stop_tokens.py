"""Whether a response ended by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl_mux.rollout.engine.sglang.stop_tokens import eos_token_ids, has_ended


@pytest.mark.parametrize(
    ("tokens", "params", "ended"),
    [
        ([5, 1], {}, True),
        ([1, 5], {}, False),
        ([], {}, False),
        ([5, 1], {"ignore_eos": True}, False),
        ([5, 9], {"stop_token_ids": [9]}, True),
        ([5, 9], {"stop_token_ids": [9], "ignore_eos": True}, True),
    ],
)
def test_an_abort_that_crosses_the_end_of_a_response_has_ended_it(tokens, params, ended):
    assert has_ended(tokens, params, {1}) is ended


def test_ends_of_sequence_are_those_of_the_model_and_of_the_tokenizer():
    tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=[3])
    model = SimpleNamespace(hf_eos_token_id={1})
    assert eos_token_ids(SimpleNamespace(model_config=model, tokenizer=tokenizer)) == {1, 2, 3}
    bare = SimpleNamespace(model_config=SimpleNamespace(hf_eos_token_id=None), tokenizer=None)
    assert eos_token_ids(bare) == set()
