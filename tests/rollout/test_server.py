"""What our server adds to an answer of the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")


def _server(eos, tokenizer):
    from verl_mux.rollout.server import MuxSGLangHttpServer

    server = object.__new__(MuxSGLangHttpServer)
    server.tokenizer_manager = SimpleNamespace(model_config=SimpleNamespace(hf_eos_token_id=eos), tokenizer=tokenizer)
    return server


@pytest.mark.parametrize(
    ("tokens", "params", "ended"),
    [
        ([5, 1], {}, True),
        ([5, 2], {}, True),
        ([5, 3], {}, True),
        ([1, 5], {}, False),
        ([], {}, False),
        ([5, 1], {"ignore_eos": True}, False),
        ([5, 9], {"stop_token_ids": [9]}, True),
    ],
)
def test_an_abort_that_crosses_the_end_of_a_response_has_ended_it(tokens, params, ended):
    tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=[3])
    assert _server({1}, tokenizer)._has_ended(tokens, params) is ended


def test_a_model_without_end_of_sequence_never_ends():
    assert not _server(None, None)._has_ended([5, 1], {})
