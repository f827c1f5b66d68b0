"""verl's agent loop workers with one span and one seed per request, and a completion signal instead of polling.

`MuxAgentLoopManager` runs in the trainer's driver, where our trainer modes set it as `rollout.agent.agent_loop_manager_class`;
`MuxAgentLoopWorker` runs in each agent loop worker. Prompt groups handed over with `generate_sequences` run to their end; those
handed over with `launch` are cut off and let go on by the trainer. Touches the workers, over Ray, and verl's TransferQueue.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import hydra
import ray
import xxhash
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.rollout_trace import rollout_trace_attr

from verl_mux.profiling.eventlog import events
from verl_mux.rollout.engine.record import engines
from verl_mux.rollout.instructions import Launch, RunningSample
from verl_mux.rollout.worker.prompt_groups import PromptGroups
from verl_mux.rollout.worker.request_log import in_time, part, request, scored, text
from verl_mux.rollout.worker.server_client import ResponseClient
from verl_mux.worker_settings import WorkerSettings, open_worker_log

_Item = TypeVar("_Item")
_VerlWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


@functools.lru_cache(maxsize=64)
def _loop_class(target: str) -> type:
    return hydra.utils.get_class(target)


def make_agent_loop(entry: Any, **arguments: Any) -> Any:
    """The agent loop of a registry entry, as `hydra.utils.instantiate(config=entry, **arguments)` makes it.

    Hydra copies and merges configs for milliseconds a sample: measured, 40 % of what verl's worker does for a short request.
    """
    if isinstance(entry, dict) and set(entry) == {"_target_"}:
        return _loop_class(entry["_target_"])(**arguments)
    return hydra.utils.instantiate(config=entry, **arguments)


class Progress(NamedTuple):
    """Since the worker started: prompts handed to it, prompts settled."""

    prompts: int
    settled: int


def request_seed(*parts: Any) -> int:
    """A 31-bit seed from what identifies a request: job seed, step, prompt index, sample number."""
    return xxhash.xxh32_intdigest("/".join(map(str, parts)).encode()) >> 1


class MuxToolAgentLoop(ToolAgentLoop):
    """verl's `tool_agent` with one event a tool call."""

    async def _call_tool(self, tool_call: Any, *args: Any, **kwargs: Any) -> Any:
        with part(events.TOOL_EXECUTION, tool=getattr(tool_call, "name", None)):
            return await super()._call_tool(tool_call, *args, **kwargs)


class MuxAgentLoopWorker(PromptGroups, _VerlWorker):
    """One agent loop worker. `wait_progress` answers when a prompt has settled, so the trainer need not poll."""

    llm_client: Any

    def __init__(self, config, *args, **kwargs) -> None:
        PromptGroups.__init__(self)
        _VerlWorker.__init__(self, config, *args, **kwargs)
        self._settings = WorkerSettings.from_rollout_config(config.actor_rollout_ref.rollout)
        self.llm_client = ResponseClient(self.llm_client, self.rollout_config)
        if "tool_agent" in _agent_loop_registry:
            _agent_loop_registry["tool_agent"] = {"_target_": f"{__name__}.MuxToolAgentLoop"}
        self._prompts = self._settled = 0
        self._changed = asyncio.Event()

    def set_worker_rank(self, rank: int) -> None:
        """Name this worker's event log."""
        self.log = open_worker_log(self._settings, "rollout", rank)

    async def wait_progress(self, settled: int, timeout: float) -> Progress:
        """Return as soon as all prompts handed out have settled and they are more than `settled`, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._settled < self._prompts or self._settled <= settled:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except asyncio.TimeoutError:
                break
        return Progress(self._prompts, self._settled)

    async def launch(self, launches: list[Launch], batch=None, calls: dict[str, dict[int, list]] | None = None) -> None:
        """Let samples generate. batch: rows of prompt groups that are new here. calls: what a checkpoint knows of them."""
        self.announce(launches, calls or {}, set(batch["uid"]) if batch is not None else set())
        if batch is not None:
            await self.generate_sequences(batch)
        self.start(launches)

    def running_samples(self) -> tuple[list[RunningSample], float | None]:
        """Samples that may generate, and the seconds a token took lately."""
        return self.running(), self.llm_client.token_s

    # ---------------------------------------------------------------- verl's steps of a prompt and of a sample

    async def generate_sequences(self, batch) -> None:
        self._prompts += len(batch)
        await super().generate_sequences(batch)

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        uid = prompt["uid"]
        controlled = self.has_group(uid)
        if controlled:
            self.started(uid, asyncio.current_task())
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            self._settled += 1
            self._changed.set()
        if controlled:
            self.settled(uid)

    async def _run_agent_loop(self, sampling_params, trajectory, *, session_id: int = 0, **kwargs):
        params = dict(sampling_params)
        if self._settings.seeded_sampling:
            params[engines()[self.config.actor_rollout_ref.rollout.name].seed] = request_seed(
                self._settings.seed, trajectory["step"], kwargs.get("index", 0), session_id, trajectory["validate"]
            )
        who = {"batch_data_id": str(kwargs.get("index")), "session": session_id, "validate": bool(trajectory["validate"])}
        with request(self.log, f"{kwargs.get('uid')}_{session_id}", int(trajectory["step"]), **who):
            loop = functools.partial(self._run_loop, params, trajectory, session_id=session_id, **kwargs)
            limited = functools.partial(in_time, self._settings.sample_timeout_s, loop)
            return await self.run_sample(str(kwargs.get("uid")), session_id, limited)

    async def _run_loop(self, sampling_params, trajectory, *, agent_name: str, trace: bool = True, **kwargs):
        """verl's `_run_agent_loop`, with an agent loop from `make_agent_loop`."""
        where = {key: trajectory[key] for key in ("step", "sample_index", "rollout_n", "validate")}
        with rollout_trace_attr(**where, name="agent_loop", trace=trace):
            if agent_name not in _agent_loop_registry:
                raise ValueError(f"agent loop {agent_name!r} is not registered; there are {', '.join(_agent_loop_registry)}")
            agent_loop = make_agent_loop(
                _agent_loop_registry[agent_name],
                trainer_config=DictConfigWrap(config=self.config),
                server_manager=self.llm_client,
                tokenizer=self.tokenizer,
                processor=self.processor,
                hf_model_type=self.hf_model_type,
                dataset_cls=self.dataset_cls,
                data_config=DictConfigWrap(self.config.data),
                tools=ToolListWrap(self.tools),
            )
            output = await agent_loop.run(sampling_params, **kwargs)
            return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    async def _compute_score(self, outputs, *args, **kwargs) -> None:
        with part(events.REWARD) as extra:
            await super()._compute_score(outputs, *args, **kwargs)
            extra["score"] = scored(outputs[-1].reward_score)

    async def _agent_loop_postprocess(self, output, *args, **kwargs):
        self.ending(output)
        if self._settings.texts:
            it = self._settings
            text(it.texts, it.text_chars, self.tokenizer.decode, output.prompt_ids, output.response_ids)
        with part(events.FINALIZATION):
            return await super()._agent_loop_postprocess(output, *args, **kwargs)


class MuxAgentLoopManager(AgentLoopManagerTQ):
    """Spawns our workers, and knows which of them has which prompt group."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(MuxAgentLoopWorker)
        self._worker_of: dict[str, Any] = {}

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        await asyncio.gather(*[w.set_worker_rank.remote(rank) for rank, w in enumerate(self.agent_loop_workers)])

    def knows(self, group: str) -> bool:
        """Does a worker have this prompt group?"""
        return group in self._worker_of

    def launch(self, launches: list[Launch], batch=None, calls: dict[str, dict[int, list]] | None = None) -> None:
        """Let samples generate, each on the worker that has its group; the groups of `batch` are spread over the workers."""
        new: dict[Any, Any] = {}
        if batch is not None:
            for worker, chunk in zip(self.agent_loop_workers, batch.chunk(len(self.agent_loop_workers)), strict=False):
                new[worker] = chunk
                self._worker_of.update(dict.fromkeys(chunk["uid"], worker))
        asked = []
        for worker, its_launches in self._by_worker((launch.group, launch) for launch in launches).items():
            groups = {launch.group for launch in its_launches}  # the calls of all workers' groups may be gigabytes
            its_calls = {group: known for group, known in (calls or {}).items() if group in groups}
            asked.append(worker.launch.remote(its_launches, new.get(worker), its_calls))
        ray.get(asked)

    def cut(self, samples: list[tuple[str, int]]) -> None:
        """Cut samples off, (prompt group, number) each; what becomes of them is reported."""
        self._ask("cut", ((sample[0], sample) for sample in samples))

    def drop(self, groups: list[str]) -> None:
        """Give whole prompt groups up."""
        self._take_off("drop", groups)

    def forget(self, groups: list[str]) -> None:
        """These prompt groups are the trainer's now."""
        self._take_off("forget", groups)

    def saved_calls(self, groups: list[str]) -> dict[str, dict[int, list]]:
        """The engine calls of each sample, by prompt group and sample, for a checkpoint; of groups that a worker has."""
        answers = self._ask("saved_calls", ((group, group) for group in groups if self.knows(group)))
        return {group: calls for answer in answers for group, calls in answer.items()}

    def _take_off(self, verb: str, groups: list[str]) -> None:
        self._ask(verb, ((group, group) for group in groups))
        for group in groups:
            del self._worker_of[group]

    def _ask(self, verb: str, items: Iterable[tuple[str, Any]]) -> list[Any]:
        """The answers of the workers, each asked for the items of its prompt groups."""
        return ray.get([getattr(worker, verb).remote(its_items) for worker, its_items in self._by_worker(items).items()])

    def _by_worker(self, items: Iterable[tuple[str, _Item]]) -> dict[Any, list[_Item]]:
        """Items by the worker that has the prompt group that stands beside each."""
        by_worker: dict[Any, list[_Item]] = {}
        for group, item in items:
            by_worker.setdefault(self._worker_of[group], []).append(item)
        return by_worker
