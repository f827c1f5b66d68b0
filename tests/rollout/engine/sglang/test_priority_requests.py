"""What goes in and out of SGLang's tokenizer manager with a request, beside verl."""

import asyncio
from types import SimpleNamespace

import pytest

from verl_mux.rollout.engine.sglang import priority_requests


@pytest.fixture
def manager():
    """Answers each request with the finish reason that it names, and as SGLang does keeps the names of those that it aborted."""

    async def generate_request(request, _=None):
        made.rid_to_state[request.rid] = request
        yield {"meta_info": {"id": request.rid, "finish_reason": {"type": request.finish}, "cached_tokens": 3}}

    async def handle(received):
        pass

    made = SimpleNamespace(
        rid_to_state={},
        generate_request=generate_request,
        _handle_batch_output=handle,
        server_args=SimpleNamespace(enable_priority_scheduling=True),
    )
    priority_requests.install(made)
    return made


def ask(manager, finish, priority=0):
    request = SimpleNamespace(rid="r", finish=finish)

    async def once():
        with priority_requests.priority(priority) as told:
            await manager.generate_request(request, None).__anext__()  # as verl does
        return told

    return request, asyncio.run(once())


def test_a_request_has_the_priority_of_its_block_and_its_answer_is_told(manager):
    request, told = ask(manager, "stop", priority=5)
    assert request.priority == 5 and told["cached_tokens"] == 3


@pytest.mark.parametrize(("finish", "is_kept"), [("abort", False), ("stop", True)])
def test_a_request_that_was_aborted_may_come_again_under_its_name(manager, finish, is_kept):
    ask(manager, finish)
    assert ("r" in manager.rid_to_state) is is_kept
