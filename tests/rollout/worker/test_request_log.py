"""What a request's events say: turns are the agent loop's, stays are numbered through, parked time is told apart."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from verl_mux.profiling.eventlog.log import EventLog
from verl_mux.rollout.engine.serving import ANSWER, stay_of
from verl_mux.rollout.instructions import Launch
from verl_mux.rollout.worker import request_log, server_client
from verl_mux.rollout.worker.prompt_groups import Response, current
from verl_mux.rollout.worker.server_client import ResponseClient

CONFIG = SimpleNamespace(response_length=64, prompt_length=64)


class Engine:
    """Answers with `tokens` of what is asked for, at most; keeps the names it was asked under."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers, self.names = list(answers), []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        self.names.append(server_client._engine_request.get())
        count, reason = self.answers.pop(0)
        extra = {"global_steps": 3, ANSWER: {"replica": 1, "node": "r1", "queue_sec": 0.5, "held_sec": 0.0, "version": 3}}
        return SimpleNamespace(token_ids=[1] * count, log_probs=None, stop_reason=reason, extra_fields=extra)


@pytest.fixture
def log(tmp_path):
    return EventLog(tmp_path, worker=0, role="rollout", job="a")


def events(log) -> list[dict]:
    log.flush()
    found = [json.loads(line) for path in log.files.directory.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [line for line in found if not line["event"].startswith("log_")]


def named(log, name: str) -> list[dict]:
    return [{**line["extra"], "at": line["step"]} for line in events(log) if line["event"] == name]


def client(engine) -> ResponseClient:
    return ResponseClient(engine, CONFIG)


async def ask(of: ResponseClient, prompt=(1, 2)):
    return await of.generate("sticky", prompt_ids=list(prompt), sampling_params={})


def test_a_plain_request_has_a_stay_a_turn(log):
    engine = Engine((4, "stop"), (6, "stop"))

    async def run():
        with request_log.request(log, "u_0", 5, validate=False):
            for _turn in range(2):
                output = await ask(client(engine))
                assert ANSWER not in output.extra_fields

    asyncio.run(run())
    calls = named(log, "turn_engine_call")
    assert [(c["turn"], c["stay"], c["replica"], c["node"], c["queue_sec"], c["version"]) for c in calls] == [
        (1, 1, 1, "r1", 0.5, 3),
        (2, 2, 1, "r1", 0.5, 3),
    ]
    assert [stay_of(name) for name in engine.names] == [("u_0", 5, 1, 1), ("u_0", 5, 2, 2)]
    (done,) = named(log, "async_rollout_request_complete")
    assert (done["turns"], done["stays"], done["response_length"], done["parked_sec"]) == (2, 2, 10, 0.0)
    assert [it["turn"] for it in named(log, "turn_pre_process")] == [1, 2]


def test_a_turn_that_is_cut_off_goes_on_as_the_same_turn_in_the_step_of_its_launch(log):
    engine = Engine((4, "abort"), (6, "stop"))
    reports = []

    async def run():
        response = Response("u", 0, reports.append)
        response.launch(Launch("g", 0, step=5))
        current.set(response)
        with request_log.request(log, "u_0", 5):
            generate = engine.generate

            async def cut_off(*args, **kwargs):
                output = await generate(*args, **kwargs)
                if output.stop_reason == "abort":
                    response.close()
                return output

            engine.generate = cut_off
            task = asyncio.ensure_future(ask(client(engine)))
            while not reports:
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)
            response.launch(Launch("g", 0, kept=4, step=6))
            output = await task
            assert len(output.token_ids) == 10

    asyncio.run(run())
    calls = named(log, "turn_engine_call")
    assert [(c["turn"], c["stay"], c["finish_reason"], c["at"]) for c in calls] == [(1, 1, "abort", 5), (1, 2, "stop", 6)]
    # On a busy machine it may also have been parked before its first stay, for a moment.
    (parked,) = [it for it in named(log, "request_parked") if it["reason"] != "not launched"]
    assert (parked["turn"], parked["reason"], parked["at"]) == (1, "cut off", 6)
    (done,) = named(log, "async_rollout_request_complete")
    assert (done["turns"], done["stays"], done["at"]) == (1, 2, 6) and done["parked_sec"] >= 0.01


@pytest.mark.parametrize(("error", "reason"), [(asyncio.CancelledError, "cancelled"), (ValueError, "failed")])
def test_a_request_that_is_given_up_is_not_told_as_complete(log, error, reason):
    with pytest.raises(error), request_log.request(log, "u_0", 5):
        raise error
    assert [line["event"] for line in events(log)] == ["request_start", "aborted_request_with_cancelled_error"]
    assert named(log, "aborted_request_with_cancelled_error")[0]["reason"] == reason


def test_a_request_that_failed_says_of_what_in_one_line(log):
    with pytest.raises(ValueError), request_log.request(log, "u_0", 5):
        raise ValueError("no such tool\nand much more" + "x" * 9999)
    assert named(log, "aborted_request_with_cancelled_error")[0]["error"] == "ValueError: no such tool"


@pytest.mark.parametrize("parked_s", [0.0, 0.3])
def test_a_sample_that_does_not_end_fails_after_its_time_and_says_in_which_turn(log, parked_s):
    """What it could not generate in does not count."""
    ended = []

    async def hangs():
        request_log.current.get().begin_turn(2)
        try:
            if parked_s:
                async with request_log.parked(SimpleNamespace(step=5, held_by="cut off")):
                    await asyncio.sleep(parked_s)
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def run():
        began = time.monotonic()
        with request_log.request(log, "u_0", 5):
            try:
                await request_log.in_time(0.1, hangs)
            finally:
                assert time.monotonic() - began >= parked_s + 0.1 and ended == [True]

    with pytest.raises(request_log.TooLong):
        asyncio.run(run())
    (event,) = named(log, "aborted_request_with_cancelled_error")
    assert (event["reason"], event["error"]) == (
        "failed", "TooLong: no end after 0.1 s (mux.rollout.sample_timeout_s), in turn 2",
    )  # fmt: skip


def test_a_sample_that_ends_in_time_gives_what_it_found_and_one_that_is_given_up_ends(log):
    async def run():
        async def found():
            await asyncio.sleep(0)
            return 7

        inside = asyncio.Event()

        async def hangs():
            try:
                inside.set()
                await asyncio.Event().wait()
            finally:
                inside.clear()

        with request_log.request(log, "u_0", 5):
            assert await request_log.in_time(60.0, found) == await request_log.in_time(None, found) == 7
            task = asyncio.ensure_future(request_log.in_time(60.0, hangs))
            await inside.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0)
            assert not inside.is_set()

    asyncio.run(run())


def test_the_score_is_told_with_the_reward_and_the_request(log):
    with request_log.request(log, "u_0", 5), request_log.part("reward_calculation") as told:
        told["score"] = request_log.scored(0.25)
    assert named(log, "reward_calculation")[0]["score"] == 0.25
    assert named(log, "async_rollout_request_complete")[0]["score"] == 0.25
    assert request_log.scored(None) is None


@pytest.mark.parametrize(("share", "most", "told"), [
    (0.0, 8, None), (1.0, 8, ("1 2 3", "4 5", 0)), (1.0, 4, ("1 … 3", "4 5", 1)), (1.0, 2, ("1…3", "4…5", 4)),
])  # fmt: skip
def test_the_text_of_chosen_requests_is_logged_cut_in_its_middle(log, share, most, told):
    def decode(ids):
        return " ".join(map(str, ids))

    request_log.text(share, most, decode, [9], [9])  # of no request
    with request_log.request(log, "q_0", 4):
        request_log.text(share, most, decode, [1, 2, 3], [4, 5])
    found = [e["extra"] for e in events(log) if e["event"] == "request_text"]
    wanted = told and {"request_id": "q_0", "prompt": told[0], "response": told[1], "left_out": told[2]}
    assert found == ([wanted] if wanted else [])


def test_about_the_share_that_was_asked_for_is_chosen_by_name(log):
    for number in range(400):
        with request_log.request(log, f"q{number}_0", 4):
            request_log.text(0.1, 8, str, [1], [2])
    assert 20 <= sum(e["event"] == "request_text" for e in events(log)) <= 60
