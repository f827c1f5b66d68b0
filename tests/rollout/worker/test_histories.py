"""Whatever happens to a step's responses together (cut off, let go on, failing; engines that join and leave; new weights; a
resume), each comes out whole, token by token, and is told of once a round.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import hypothesis.strategies as st
from hypothesis import given, settings
from verl.workers.rollout.replica import TokenOutput

from verl_mux.rollout.instructions import Launch
from verl_mux.rollout.worker.prompt_groups import PromptGroups, current
from verl_mux.rollout.worker.server_client import CutBeforeEngine, ResponseClient

GROUPS, SAMPLES, SERVERS = ("g", "h"), 3, ("a", "b", "c")
PROMPT = [100, 101]
ALL = [(group, sample) for group in GROUPS for sample in range(SAMPLES)]


class Handle:
    """Of a server, as Ray's."""

    def __init__(self, aborted: set[str]) -> None:
        self.abort_requests = SimpleNamespace(remote=aborted.update)


class Servers:
    """Engines that write 1, 2, 3, ... after the prompt, a token a turn of the event loop. What has left gets no new requests."""

    def __init__(self, ends: dict[tuple[str, int], int]) -> None:
        self.ends, self.version, self.open = ends, 1, set(SERVERS)
        self.running: Counter[str] = Counter()
        self.left: set[str] = set()
        self.late: list[str] = []  # asked when their nodes had been given back
        self._aborted: set[str] = set()
        self.handles = {name: Handle(self._aborted) for name in SERVERS}

    async def generate(self, request_id, *, prompt_ids, sampling_params, engine_priority=0, **kwargs):
        response = current.get()
        await asyncio.sleep(0)  # for the balancer's answer
        target = response.take_target()
        name = target[0] if target is not None else min(self.open, key=lambda at: (self.running[at], at))
        if not response.open.is_set():
            raise CutBeforeEngine
        response.server, response.server_id = self.handles[name], name
        self.running[name] += 1
        self.late += [name] if name in self.left else []
        try:
            return await self._write(response, name, len(prompt_ids) - len(PROMPT), sampling_params["max_tokens"])
        finally:
            self.running[name] -= 1

    async def _write(self, response, name, written, room):
        tokens, reason, end = [], "length", self.ends[response.group, response.sample]
        while len(tokens) < room:
            await asyncio.sleep(0)
            if response.engine_request in self._aborted:
                reason = "abort"
                break
            tokens.append(written + len(tokens) + 1)
            if tokens[-1] == end:
                reason = "stop"
                break
        logs = [-float(token) for token in tokens]
        return TokenOutput(token_ids=tokens, log_probs=logs, stop_reason=reason, extra_fields={"global_steps": self.version})


class Step:
    """The prompt groups of an agent loop worker, with agent loops of one engine call, and what a trainer knows of them."""

    def __init__(self, servers: Servers) -> None:
        self.servers, self.step = servers, 0
        self.done: dict[tuple[str, int], TokenOutput] = {}
        self.written: dict[tuple[str, int], TokenOutput] = {}
        self.failing: set[tuple[str, int]] = set()
        self._begin({})

    def _begin(self, calls: dict) -> None:
        self.groups = PromptGroups()
        self.client = ResponseClient(self.servers, SimpleNamespace(prompt_length=8, response_length=100))
        self.known, self.kept, self.tasks = calls, dict.fromkeys(ALL, 0), {}
        for group, samples in calls.items():
            for sample, its in samples.items():
                self.kept[group, sample] = sum(len(call["token_ids"]) for call in its)
        self.out: set[tuple[str, int]] = set()  # launched, and not told of since

    async def launch(self) -> None:
        """All that are neither done nor out."""
        self.step += 1
        launches = [Launch(*it, kept=self.kept[it], step=self.step) for it in ALL if it not in self.out and it not in self.done]
        new = {launch.group for launch in launches if not self.groups.has_group(launch.group)}
        again = [Launch(*it, kept=self.kept[it], step=self.step) for it in self.done if it[0] in new]
        self.groups.announce([*launches, *again], self.known, new)
        for group in new:
            self.tasks[group] = asyncio.create_task(self._run(group))
        self.groups.start([*launches, *again])
        self.out |= {(it.group, it.sample) for it in (*launches, *again)}

    async def _run(self, group: str) -> None:
        self.groups.started(group, asyncio.current_task())
        samples = [self.groups.run_sample(group, n, lambda n=n: self._loop(group, n)) for n in range(SAMPLES)]
        await asyncio.gather(*[asyncio.create_task(it) for it in samples])
        self.groups.settled(group)

    async def _loop(self, group: str, sample: int) -> None:
        output = await self.client.generate("r", prompt_ids=PROMPT, sampling_params={"temperature": 0.0})
        if (group, sample) in self.failing:
            self.failing.discard((group, sample))
            raise RuntimeError("the reward server is away")
        self.groups.ending(SimpleNamespace(extra_fields=output.extra_fields))
        self.written[group, sample] = output

    async def listen(self) -> None:
        """Takes the reports that are there. Not by a time limit: a history is to be the same each time."""
        await asyncio.sleep(0)
        for report in await self.groups.reports(1.0) if self.groups._reports else ():
            it = (report.group, report.sample)
            assert it in self.out, f"{it} was told of twice"
            self.out.discard(it)
            self.kept[it] = report.total
            if report.kind == "done":
                self.done[it] = self.written[it]

    async def resume(self) -> None:
        """A checkpoint between two steps, and another worker that goes on from it."""
        self.groups.cut(ALL)
        while self.out:
            await self.listen()
        calls = json.loads(json.dumps(self.groups.saved_calls(GROUPS)))
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self._begin({group: {int(n): its for n, its in samples.items()} for group, samples in calls.items()})

    async def leave(self, name: str) -> None:
        """An engine's node is given back."""
        if self.servers.open == {name}:
            return
        self.servers.open.discard(name)
        while self.groups.evacuate([name], {}):
            await asyncio.sleep(0)
        assert not self.servers.running[name], "a node went back with requests on it"
        self.servers.left.add(name)

    def join(self, name: str, samples: list[tuple[str, int]]) -> None:
        self.servers.open.add(name)
        self.servers.left.discard(name)
        self.groups.redirect(dict.fromkeys(samples, (name, self.servers.handles[name])))


one = st.sampled_from(ALL)
events = st.one_of(
    st.tuples(st.just("turns"), st.integers(1, 30)),
    st.tuples(st.just("leave"), st.sampled_from(SERVERS)),
    st.tuples(st.just("join"), st.sampled_from(SERVERS), st.lists(one, max_size=4)),
    st.tuples(st.just("cut"), st.lists(one, min_size=1, max_size=4)),
    st.tuples(st.just("fails"), one),
    st.tuples(st.just("launch")),
    st.tuples(st.just("sync")),
    st.tuples(st.just("resume")),
)


async def history(ends: list[int], happens: list[tuple]) -> Step:
    it = Step(Servers(dict(zip(ALL, ends, strict=True))))
    await it.launch()
    for what, *about in happens:
        if what == "turns":
            for _ in range(*about):
                await asyncio.sleep(0)
        elif what == "leave":
            await it.leave(*about)
        elif what == "join":
            it.join(*about)
        elif what == "cut":
            it.groups.cut(*about)
        elif what == "fails":
            it.failing |= set(about)
        elif what == "sync":
            it.servers.version += 1
        elif what == "launch":
            await it.launch()
        else:
            await it.resume()
            await it.launch()
        await it.listen()
    while len(it.done) < len(ALL):
        await it.launch()
        await it.listen()
    return it


@given(st.lists(st.integers(1, 60), min_size=len(ALL), max_size=len(ALL)), st.lists(events, max_size=25))
@settings(deadline=None)
def test_every_response_comes_out_whole_and_once(ends, happens):
    it = asyncio.run(asyncio.wait_for(history(ends, happens), 60))
    assert it.servers.late == []
    for name, end in zip(ALL, ends, strict=True):
        output = it.done[name]
        assert output.token_ids == list(range(1, end + 1)), name
        assert output.log_probs == [-float(token) for token in output.token_ids]
        segments = output.extra_fields["mux_segments"]
        assert sum(length for length, _ in segments) == end
        assert [version for _, version in segments] == sorted({version for _, version in segments})
