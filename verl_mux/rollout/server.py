"""verl's SGLang server with tagged sleep and wake, and one event per request.

launch -> gate (waits for the init lease) -> AWAKE -> ASLEEP -> (wake weights -> sync -> wake KV cache -> generate -> ASLEEP)*
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import psutil
from sglang.srt.managers.io_struct import (
    GetWeightsByNameReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from verl_mux.memory.sleep_states import TAGS, WEIGHTS, SleepState, SleepStates
from verl_mux.memory.tag_report import DIRECTORY_VARIABLE, TagReport, mapped_bytes, read_reports
from verl_mux.platform.sglang_plugin import ENGINE_MARK, SEEDED_VARIABLE
from verl_mux.rollout import priority_requests, stop_tokens
from verl_mux.rollout.flight_client import ABORTED
from verl_mux.worker_settings import WorkerSettings, open_worker_log, pin

_ABORT_AGAIN_S = 0.05


class MuxSGLangHttpServer(SGLangHttpServer):
    """A server that holds no weights and no KV cache while its job has no rollout lease."""

    def __init__(self, config, *args, **kwargs) -> None:
        self._settings = WorkerSettings.from_rollout_config(config)
        pin(self._settings.rollout_cpus)
        super().__init__(config, *args, **kwargs)
        self._events = open_worker_log(self._settings, "server", self.replica_rank)
        self._states = SleepStates(SleepState.AWAKE)
        self._moving = asyncio.Lock()
        self._running: set[str] = set()
        self._eos_token_ids: set[int] = set()
        self._directory = self._settings.server_directory(self.replica_rank, self.node_rank)
        self._directory.mkdir(parents=True, exist_ok=True)
        os.environ[ENGINE_MARK] = "1"
        os.environ[DIRECTORY_VARIABLE] = str(self._directory)
        os.environ[SEEDED_VARIABLE] = "1" if self._settings.seeded_sampling else "0"

    async def sleep(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Give device memory back. Idempotent. Returns bytes freed by tag and the seconds it took."""
        return await self._move("sleep", list(tags or TAGS))

    async def wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Take device memory again, weights before KV cache; contents of the weights are the next sync's business. Idempotent."""
        return await self._move("wake", list(tags or TAGS))

    async def release_kv_cache(self) -> None:
        await self.sleep(["kv_cache"])

    async def resume_kv_cache(self) -> None:
        await self.wake_up(["kv_cache"])

    async def mapped_bytes(self) -> dict[str, int]:
        """Bytes on the device now, by tag."""
        return mapped_bytes(self._reports())

    async def processes(self) -> list[tuple[int, float]]:
        """(pid, creation time) of every process of this engine."""
        own = psutil.Process()
        return [(p.pid, p.create_time()) for p in (own, *own.children(recursive=True))]

    async def load_weights(self, path: str, global_steps: int | None) -> None:
        """Load the safetensors in `path` (shared memory) over the weights in place."""
        request = UpdateWeightFromDiskReqInput(model_path=path, load_format="auto", flush_cache=True)
        success, message, *_ = await self.tokenizer_manager.update_weights_from_disk(request, None)
        if not success:
            raise RuntimeError(f"the engine could not load the synced weights: {message}")
        self.global_steps = global_steps

    async def read_weight(self, name: str, count: int) -> list:
        """The first `count` rows of a weight as the engine holds it."""
        return await self.tokenizer_manager.get_weights_by_name(GetWeightsByNameReqInput(name=name, truncate_size=count), None)

    async def launch_server(self, *args, **kwargs) -> None:
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0:
            priority_requests.install(self.tokenizer_manager)
            self._eos_token_ids = stop_tokens.eos_token_ids(self.tokenizer_manager)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Abort these, and return when they have left the engine with the tokens they have.

        Repeated, because the scheduler ignores an abort of a request that it has not received yet.
        """
        while left := self._running.intersection(request_ids):
            for request_id in left:
                self.tokenizer_manager.abort_request(rid=request_id)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def generate(
        self, prompt_ids, sampling_params: dict[str, Any], request_id: str, engine_priority: int = 0, **kwargs
    ) -> TokenOutput:
        """verl's generate, refused while any tag sleeps, timed in the event log. engine_priority: higher goes first."""
        if self._states.state is not SleepState.AWAKE:
            raise RuntimeError(f"request {request_id}: the engine is {self._states.state.value}, the job has no rollout lease")
        started = time.perf_counter()
        self._running.add(request_id)
        try:
            with priority_requests.priority(engine_priority) as answer:
                output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            self._running.discard(request_id)
        if output.stop_reason in ABORTED and stop_tokens.has_ended(output.token_ids, sampling_params, self._eos_token_ids):
            output.stop_reason = "stop"
        self._events.log(
            "engine_generate",
            time.perf_counter() - started,
            extra={
                "request_id": request_id,
                "prompt_tokens": len(prompt_ids),
                "response_tokens": len(output.token_ids),
                "finish": output.stop_reason,
                "cached_tokens": answer.get("cached_tokens"),
            },
            step=(self.global_steps or 0) + 1,
        )
        return output

    async def _move(self, verb: str, tags: list[str]) -> dict[str, Any]:
        if self.node_rank != 0 or not self.config.free_cache_engine:
            return {}
        async with self._moving:
            steps, after = self._states.plan(verb, tags)
            moved: dict[str, Any] = {}
            try:
                for tag in steps:
                    moved[tag] = await self._move_tag(verb, tag)
            except BaseException:
                self._states.failed()
                raise
            self._states.done(after)
        return moved

    async def _move_tag(self, verb: str, tag: str) -> dict[str, float]:
        started, before = time.perf_counter(), mapped_bytes(self._reports()).get(tag, 0)
        if verb == "sleep":
            await self.tokenizer_manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=[tag]), None)
        else:
            await self.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[tag]), None)
        seconds, after = time.perf_counter() - started, mapped_bytes(self._reports()).get(tag, 0)
        nbytes = abs(after - before)
        node = ",".join(self._settings.rollout_nodes)
        self._events.log(
            verb,
            seconds,
            extra={"tag": tag, "bytes": nbytes, "mapped": after, "node": node, "side": "rollout"},
            step=(self.global_steps or 0) + 1,
        )
        return {"bytes": nbytes, "mapped": after, "seconds": seconds}

    def _reports(self) -> list[TagReport]:
        return read_reports(self._directory)

    @property
    def weights_mapped(self) -> bool:
        return mapped_bytes(self._reports()).get(WEIGHTS, 0) > 0
