"""What goes in and out of SGLang's tokenizer manager with a request, beside verl."""

import asyncio
from types import SimpleNamespace

import pytest

from verl_mux.rollout.engine.serving import Refused, StallWatch
from verl_mux.rollout.engine.sglang import manager as manager_module
from verl_mux.rollout.engine.sglang.manager import eos_token_ids, has_ended, install, priority
from verl_mux.rollout.engine.sglang.scheduler_memory import REPORT, Answer


@pytest.fixture
def manager():
    """Answers each request with the finish reason that it names, and as SGLang does keeps the names of those that it aborted."""

    async def generate_request(request, _=None):
        made.rid_to_state[request.rid] = SimpleNamespace(obj=request)
        yield {"meta_info": {"id": request.rid, "finish_reason": {"type": request.finish}, "cached_tokens": 3}}

    async def handle(received):
        pass

    async def release(adapter):
        made.released.append(adapter)

    made = SimpleNamespace(
        rid_to_state={},
        released=[],
        lora_registry=SimpleNamespace(release=release),
        generate_request=generate_request,
        _handle_batch_output=handle,
        server_args=SimpleNamespace(enable_priority_scheduling=True),
    )
    install(made, StallWatch())
    return made


def ask(manager, finish, higher=0):
    request = SimpleNamespace(rid="r", finish=finish, lora_id="of v3")

    async def once():
        with priority(higher) as answer:
            await manager.generate_request(request, None).__anext__()  # as verl does
        return answer

    return request, asyncio.run(once())


def test_a_request_has_the_priority_of_its_block_and_its_answer_is_told(manager):
    request, answer = ask(manager, "stop", higher=5)
    assert request.priority == 5 and answer["cached_tokens"] == 3


@pytest.mark.parametrize(("finish", "is_kept"), [("abort", False), ("stop", True)])
def test_a_request_that_was_aborted_may_come_again_under_its_name(manager, finish, is_kept):
    ask(manager, finish)
    assert ("r" in manager.rid_to_state) is is_kept
    assert manager.released == ([] if is_kept else ["of v3"]), "else its adapter could never go"


class Scheduler:
    """Stands still for `stopped_s` right after an abort; then answers that requests run, until the aborted ones are reaped."""

    def __init__(self, stopped_s, reaped_at):
        self.stopped_s, self.reaped_at, self.answers = stopped_s, reaped_at, 0

    async def release(self, request):
        await asyncio.sleep(0 if self.answers else self.stopped_s)
        self.answers += 1
        busy = self.answers < self.reaped_at
        return [
            SimpleNamespace(**{REPORT: Answer("requests run in the engine; abort them first", busy=True) if busy else Answer()})
        ]


def move_to_sleep(scheduler):
    made = SimpleNamespace(auto_create_handle_loop=lambda: None, release_memory_occupation_communicator=scheduler.release)
    made.resume_memory_occupation_communicator = None
    return asyncio.run(manager_module.move(made, "sleep", ["kv_cache"], 2, 0.0))


@pytest.fixture
def patience(monkeypatch):
    monkeypatch.setattr(manager_module, "_BUSY_S", 0.2)
    monkeypatch.setattr(manager_module, "_BUSY_AGAIN_S", 0.01)


def test_a_scheduler_that_stood_still_after_an_abort_reaps_and_sleeps_when_it_goes_on(patience):
    assert move_to_sleep(Scheduler(stopped_s=0.5, reaped_at=4)) == 0


def test_a_scheduler_that_stays_busy_is_given_up_in_a_bounded_time(patience):
    with pytest.raises(Refused, match="requests run in the engine"):
        move_to_sleep(Scheduler(stopped_s=0.0, reaped_at=10**9))


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
