"""verl's agent loop workers with one span and one seed per request, and a completion signal instead of polling.

`MuxAgentLoopManager` is set as `rollout.agent.agent_loop_manager_class` by our trainer modes. Prompt groups handed over
with `generate_sequences` run to their end; those handed over with `launch` are cut off and let go on by the trainer.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import ray
import xxhash
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from verl_mux.profiling import events
from verl_mux.rollout.direct_agent_loops import DirectAgentLoopWorker
from verl_mux.rollout.flight_client import FlightClient
from verl_mux.rollout.flight_groups import FlightGroups, Plan
from verl_mux.rollout.request_log import TimedClient, part, request
from verl_mux.worker_settings import WorkerSettings, open_worker_log


class Progress(NamedTuple):
    """Since the worker started: prompts handed to it, prompts settled, samples finished."""

    prompts: int
    settled: int
    samples: int


def request_seed(*parts: Any) -> int:
    """A 31-bit seed from what identifies a request: job seed, step, prompt index, sample number."""
    return xxhash.xxh32_intdigest("/".join(map(str, parts)).encode()) >> 1


class MuxAgentLoopWorker(DirectAgentLoopWorker):
    """One agent loop worker. `wait_progress` answers when a prompt has settled, so nobody has to poll."""

    def __init__(self, config, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        self._settings = WorkerSettings.from_rollout_config(config.actor_rollout_ref.rollout)
        self._events = None
        self.llm_client = FlightClient(TimedClient(self.llm_client), self.rollout_config)
        self._groups = FlightGroups(self._settings.truncated_reward)
        if "tool_agent" in _agent_loop_registry:
            _agent_loop_registry["tool_agent"] = {"_target_": "verl_mux.rollout.tool_loop.MuxToolAgentLoop"}
        self._prompts = self._settled = self._samples = 0
        self._changed = asyncio.Event()

    def set_worker_rank(self, rank: int) -> None:
        """Name this worker's event log."""
        self._events = open_worker_log(self._settings, "rollout", rank)
        self._groups.log = self._events

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
        return Progress(self._prompts, self._settled, self._samples)

    # ---------------------------------------------------------------- groups the trainer controls

    async def launch(self, plans: list[Plan], batch=None, calls: dict[str, dict[int, list]] | None = None) -> None:
        """Let samples generate. batch: rows of prompt groups that are new here. calls: what a checkpoint knows of them."""
        self._groups.announce(plans, calls or {}, set(batch["uid"]) if batch is not None else set())
        if batch is not None:
            await self.generate_sequences(batch)
        await self._groups.launch(plans, self._start_prompt)

    async def cut(self, samples: list[tuple[str, int]]) -> None:
        """Cut these off, their tokens kept. Each is reported when it has left its engine."""
        self._groups.cut(samples)

    async def flying(self) -> tuple[list[tuple], float | None]:
        """Samples that may generate (see tail_migration.Flying), and the seconds a token took lately."""
        return self._groups.flying(), self.llm_client.token_s

    async def evacuate(self, servers: list[str]) -> int:
        """Let what runs on these servers go on elsewhere. How many are still there."""
        return self._groups.evacuate(servers)

    async def drop(self, groups: list[str]) -> None:
        """Give whole groups up."""
        await self._groups.drop(groups)

    async def forget(self, groups: list[str]) -> None:
        """These are the trainer's now."""
        self._groups.forget(groups)

    async def reports(self, timeout: float) -> list:
        """What became of samples since the last call; waits up to `timeout` seconds for something to report."""
        return await self._groups.take_reports(timeout)

    async def saved_calls(self, groups: list[str]) -> dict[str, dict[int, list]]:
        """For a checkpoint: the engine calls of each sample of these groups, by group and sample."""
        return self._groups.saved_calls(groups)

    def _start_prompt(self, uid: str, step: int) -> None:
        """Run a group from its prompt once more."""
        prompt, params, trajectory = self._groups.arguments[uid]
        self._spawn({**prompt, "global_steps": step}, params, {**trajectory, "step": step})

    def _spawn(self, prompt: dict, params: dict, trajectory: dict) -> None:
        task = asyncio.create_task(self._run_prompt(prompt, params, trajectory))
        self.background_tasks.add(task)
        task.add_done_callback(self.background_tasks.discard)

    # ---------------------------------------------------------------- verl's steps of a prompt and of a sample

    async def generate_sequences(self, batch) -> None:
        self._prompts += len(batch)
        await super().generate_sequences(batch)

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        uid = prompt["uid"]
        controlled = uid in self._groups
        if controlled:
            self._groups.running(uid, asyncio.current_task(), (dict(prompt), sampling_params, trajectory))
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            self._settled += 1
            self._changed.set()
        if controlled:
            self._groups.settled(uid)

    async def _run_agent_loop(self, sampling_params, trajectory, *, session_id: int = 0, **kwargs):
        params = dict(sampling_params)
        if self._settings.seeded_sampling:
            params["sampling_seed"] = request_seed(
                self._settings.seed, trajectory["step"], kwargs.get("index", 0), session_id, trajectory["validate"]
            )
        who = {"batch_data_id": str(kwargs.get("index")), "session": session_id, "validate": bool(trajectory["validate"])}
        with request(self._events, f"{kwargs.get('uid')}_{session_id}", int(trajectory["step"]), **who):
            run = super()._run_agent_loop
            result = await self._groups.fly(
                kwargs.get("uid"), session_id, lambda: run(params, trajectory, session_id=session_id, **kwargs)
            )
        self._samples += 1
        return result

    async def _compute_score(self, outputs, *args, **kwargs) -> None:
        with part(events.REWARD):
            await super()._compute_score(outputs, *args, **kwargs)
        self._groups.score(outputs[-1])

    async def _agent_loop_postprocess(self, output, *args, **kwargs):
        self._groups.ending(output)
        with part(events.FINALIZATION):
            return await super()._agent_loop_postprocess(output, *args, **kwargs)


class MuxAgentLoopManager(AgentLoopManagerTQ):
    """Spawns our workers, and knows which of them has which prompt group."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(MuxAgentLoopWorker)
        self.worker_of: dict[str, Any] = {}
        self.plans: list[Plan] | None = None

    def generate_sequences(self, prompts) -> None:
        """verl's; with `plans` set for these prompts, `launch`."""
        plans, self.plans = self.plans, None
        if plans is None:
            super().generate_sequences(prompts)
        else:
            self.launch(plans, prompts)

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        await asyncio.gather(*[w.set_worker_rank.remote(rank) for rank, w in enumerate(self.agent_loop_workers)])

    def launch(self, plans: list[Plan], batch=None, calls: dict[str, dict[int, list]] | None = None) -> None:
        """Let samples generate, each on the worker that has its group; the groups of `batch` are spread over the workers."""
        new: dict[Any, Any] = {}
        if batch is not None:
            for worker, chunk in zip(self.agent_loop_workers, batch.chunk(len(self.agent_loop_workers)), strict=False):
                new[worker] = chunk
                self.worker_of.update(dict.fromkeys(chunk["uid"], worker))
        by_worker: dict[Any, list[Plan]] = {}
        for plan in plans:
            by_worker.setdefault(self.worker_of[plan.group], []).append(plan)
        ray.get([worker.launch.remote(its, new.get(worker), calls) for worker, its in by_worker.items()])

    def each(self, method: str, groups: list[str], items: list[Any] | None = None) -> list[Any]:
        """Call `method` on the workers of these groups with their groups, or with the items that stand beside them."""
        by_worker: dict[Any, list[Any]] = {}
        for group, item in zip(groups, items or groups, strict=True):
            by_worker.setdefault(self.worker_of[group], []).append(item)
        return ray.get([getattr(worker, method).remote(its) for worker, its in by_worker.items()])
