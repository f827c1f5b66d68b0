"""Samples that are cut off, go on, fail and are replayed, on an engine that writes 1, 2, 3, ... after the prompt."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from verl.workers.rollout.replica import TokenOutput

from tests.in_loop import in_loop
from verl_mux.rollout.instructions import Launch, Segment
from verl_mux.rollout.worker.prompt_groups import Call, PromptGroups, Response, Stage, restored, saved
from verl_mux.rollout.worker.server_client import ResponseClient

PROMPT = [100, 101]
LENGTHS = SimpleNamespace(prompt_length=8, response_length=20)


class Engine:
    """Each token takes one turn of the event loop; a request ends at `end` tokens of response, with weights `version`."""

    def __init__(self, end: int = 10) -> None:
        self.end, self.version = end, 1
        self.asked: list[tuple[list[int], int]] = []
        self._aborted: set[str] = set()
        self.abort_requests = SimpleNamespace(remote=self._aborted.update)

    async def generate(self, request_id, *, prompt_ids, sampling_params, engine_priority=0, **kwargs):
        from verl_mux.rollout.worker.prompt_groups import current

        response = current.get()
        response.server, name = self, response.engine_request
        self.asked.append((prompt_ids, sampling_params["max_tokens"]))
        tokens, reason = [], "length"
        while len(tokens) < sampling_params["max_tokens"]:
            await asyncio.sleep(0)
            if name in self._aborted:
                reason = "abort"
                break
            tokens.append(len(prompt_ids) + len(tokens) - len(PROMPT) + 1)
            if tokens[-1] == self.end:
                reason = "stop"
                break
        logs = [-float(t) for t in tokens]
        return TokenOutput(token_ids=tokens, log_probs=logs, stop_reason=reason, extra_fields={"global_steps": self.version})


class Worker:
    """The part of the agent loop worker that runs a group, with an agent loop of one engine call."""

    def __init__(self, engine: Engine, samples: int = 2) -> None:
        self.groups, self.samples = PromptGroups(), samples
        self.client = ResponseClient(engine, LENGTHS)
        self.outputs: dict[int, TokenOutput] = {}

    async def launch(self, launches: list[Launch], new: bool = False) -> None:
        self.groups.announce(launches, {}, {"g"} if new else set())
        if new:
            self.task = asyncio.create_task(self._run("g"))
        self.groups.start(launches)

    async def _run(self, group: str) -> None:
        self.groups.started(group, asyncio.current_task())
        await asyncio.gather(
            *[asyncio.create_task(self.groups.run_sample(group, s, lambda s=s: self._loop(s))) for s in range(self.samples)]
        )
        self.groups.settled(group)

    async def _loop(self, sample: int) -> None:
        output = await self.client.generate("r", prompt_ids=PROMPT, sampling_params={"temperature": 1.0})
        output.extra_fields["mux"] = True
        self.groups.ending(SimpleNamespace(extra_fields=output.extra_fields))
        self.outputs[sample] = output

    async def reports(self, count: int) -> list:
        found = []
        while len(found) < count:
            found += await asyncio.wait_for(self.groups.reports(1.0), 10)
        return sorted(found, key=lambda r: r.sample)


def both(**given) -> list[Launch]:
    return [Launch("g", sample, step=1, **given) for sample in (0, 1)]


@in_loop
async def test_rounds_of_a_budget_and_of_new_weights_make_segments():
    engine = Engine()
    worker = Worker(engine)
    await worker.launch(both(budget=4, longest=20), new=True)
    paused = await worker.reports(2)
    assert [(r.kind, r.new, r.why) for r in paused] == [("paused", 4, "length")] * 2
    engine.version = 2
    await worker.launch(both(kept=4, budget=4, longest=20))
    assert [(r.kind, r.new, r.total, r.version) for r in await worker.reports(2)] == [("paused", 4, 8, 2)] * 2
    await worker.launch(both(kept=8, budget=4, longest=20))
    assert [(r.kind, r.new, r.total) for r in await worker.reports(2)] == [("done", 2, 10)] * 2
    output = worker.outputs[0]
    assert output.token_ids == list(range(1, 11))
    assert output.log_probs == [-float(t) for t in range(1, 11)]
    assert output.extra_fields["mux_segments"] == [[4, 1], [6, 2]]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (1, 2)


@in_loop
async def test_the_longest_ends_a_response_as_truncated():
    worker = Worker(Engine(end=1000))
    await worker.launch(both(budget=4, longest=8), new=True)
    await worker.reports(2)
    await worker.launch(both(kept=4, budget=4, longest=8))
    assert [(r.kind, r.new, r.total, r.why) for r in await worker.reports(2)] == [("done", 4, 8, "length")] * 2
    assert worker.outputs[0].extra_fields["mux_truncated"]


@in_loop
async def test_a_group_that_ended_before_its_cut_says_so_at_the_next_launch():
    worker = Worker(Engine())
    await worker.launch(both(), new=True)
    await worker.reports(2)
    await worker.launch(both(kept=10))
    assert [(r.kind, r.new, r.total) for r in await worker.reports(2)] == [("done", 0, 10)] * 2


@in_loop
async def test_a_dropped_group_stops_and_reports_nothing_more():
    worker = Worker(Engine(end=10**6))
    await worker.launch(both(longest=10**6), new=True)
    await asyncio.sleep(0)
    await worker.groups.drop(["g"])
    assert worker.task.cancelled() or worker.task.done()
    assert not worker.groups.has_group("g")


def test_many_turns_cost_no_copy_of_the_conversation_each():
    """Each turn's prompt has all turns before it."""
    response = Response("g", 0, lambda report: None)
    for turn in range(50):
        response.next_call(list(range(1000 * turn))).add([1] * 10, None, 1)
    assert len(json.dumps(saved(response))) < 50_000
    assert response.calls[-1].prompt_tokens == 49_000


def test_a_server_that_leaves_is_nobodys_target_any_more():
    worker = Worker(Engine())
    worker.groups.announce(both(), {}, {"g"})
    response, other = worker.groups._all()
    for it in (response, other):
        it.stage, it.server_id, it.server = Stage.ENGINE, "a", SimpleNamespace(abort_requests=SimpleNamespace(remote=print))
    assert worker.groups.evacuate(["a"], {("g", 0): ("b", "B"), ("g", 1): ("c", "C")}) == 2
    response.stage = other.stage = Stage.OUTSIDE  # both ended before their aborts came: tools run
    assert worker.groups.evacuate(["b"], {}) == 0
    assert (response.take_target(), other.take_target()) == (None, ("c", "C"))


@pytest.mark.parametrize("kept", [0, 3, 5, 7, 12])
def test_cutting_calls_keeps_the_first_tokens_and_their_versions(kept):
    calls = [
        Call("one", 1, [1, 2, 3, 4, 5], [0.0] * 5, [Segment(3, 1), Segment(2, 2)], "stop"),
        Call("another", 2, [6, 7, 8], None, [Segment(3, 2)], "stop"),
    ]
    response = Response("g", 0, lambda report: None, restored(saved(Response("g", 0, print, calls))))
    response.cut_to(kept)
    tokens = [token for call in response.calls for token in call.token_ids]
    assert tokens == [1, 2, 3, 4, 5, 6, 7, 8][:kept]
    assert sum(s.length for s in response.segments) == len(tokens)
