"""verl's vLLM server as ours: what vLLM does its own way. Runs in an actor of its own; the rest is ../engine_server.py's.

A tag moves by a call of our worker class (vllm_worker.py), not by vLLM's own sleep: that takes all tags at once, and compares the
free memory of the whole device before and after, which other jobs change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine import core_client

from verl_mux.memory.tags import KV_CACHE
from verl_mux.rollout.engine.engine_server import EngineServer
from verl_mux.rollout.engine.serving import ABORTED, LENGTH, STOPPED, EngineFailed, Refused
from verl_mux.rollout.engine.vllm import CONTEXTS, vllm_calls
from verl_mux.rollout.engine.vllm.vllm_worker import FIRST_DEVICE_VARIABLE, Answer
from verl_mux.warm import engine_processes

log = logging.getLogger(__name__)
_LOOK_S = 1.0  # between two looks at whether the engine is alive
# vLLM gives a launch 600 s, and a job may wait for its init lease for longer. ZMQ's longest wait is 2**31 ms.
_PATIENCE_S = 2_000_000
# A socket's path has at most 107 bytes, and vLLM's names have 36.
_LONGEST_FOLDER = 70
_SHARED = re.compile(r"(/dev/shm/(?:psm_|sem\.mp-)\S+)$", re.MULTILINE)
_REASONS = {"stop": STOPPED, "length": LENGTH, "abort": ABORTED}


def forget_shared_memory(pids: Sequence[int]) -> None:
    """All processes of an engine have mapped what they share, so its names may go: else they outlive an actor that is killed,
    with 150 MB of /dev/shm for each message queue."""
    names = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            names |= set(_SHARED.findall(Path(f"/proc/{pid}/maps").read_text()))
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)


class MuxVllmHttpServer(EngineServer, vLLMHttpServer):
    """All ranks of all engine cores are asked, and each answers: a wake that one of them refuses is taken back at the others."""

    figures = vllm_calls.FIGURES

    def _first_device(self) -> int:
        return (self.replica_rank * self.replica_world_size + self.node_rank * self.gpus_per_node) % self.config.n_gpus_per_node

    def _prepare(self) -> None:
        core_client.VLLM_ENGINE_READY_TIMEOUT_S = _PATIENCE_S  # read when it was imported
        os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(_PATIENCE_S)
        os.environ[FIRST_DEVICE_VARIABLE] = str(self._first_device())
        # The event log has its counters; a line of them in the job's log every ten seconds is left out.
        os.environ.setdefault("VLLM_LOG_STATS_INTERVAL", "86400")
        if engine_processes.is_ready():
            engine_processes.give_forks(CONTEXTS)
        # Its sockets' files go with the job's folder, where their paths are not too long for sockets.
        if len(str(self._directory)) < _LONGEST_FOLDER:
            os.environ["VLLM_RPC_BASE_PATH"] = str(self._directory)

    def _launched(self) -> None:
        where = {"replica": self.replica_rank, "node": self._node()}
        vllm_calls.EngineLog(self._events, where, self._stalls).install(self.engine)
        self._ending = asyncio.create_task(self._end_with_engine())
        forget_shared_memory([process.pid for process in psutil.Process().children(recursive=True)])

    async def _end_with_engine(self) -> None:
        """verl's agent loops would get an error of each request to an engine core that is gone, and draw other prompts for ever;
        an actor that is gone ends the job."""
        while not self.engine.errored:
            await asyncio.sleep(_LOOK_S)
        log.error("an engine core of replica %d is gone, and its server with it", self.replica_rank)
        self.engine.shutdown()
        os._exit(1)

    async def _abort(self, request_ids: Sequence[str]) -> None:
        # verl's own abort looks for vLLM's internal names and finds none.
        await self.engine.abort(request_ids)

    async def _carry_out(self, verb: str, tag: str, level: int) -> None:
        if verb == "sleep" and tag == KV_CACHE:
            await self.engine.pause_generation(mode="abort", clear_cache=True)
        wait_s = self._settings.device.wake_wait_s
        answers = [Answer(**it) for it in await self._ask("mux_move", verb, tag, level, wait_s)]
        errors = "; ".join(dict.fromkeys(answer.error for answer in answers if answer.error))
        if any(answer.failed for answer in answers):
            raise EngineFailed(errors)
        if errors:
            # All ranks of an engine, or none.
            await self._ask("mux_move", "sleep", tag, level, 0.0)
            raise Refused(errors)
        if verb == "wake" and tag == KV_CACHE:
            await self.engine.resume_generation()

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """What each worker of each engine core answers. vLLM's own `collective_rpc` gives the first core's answers only."""
        client = self.engine.engine_core
        calls = [
            client._call_utility_async("collective_rpc", method, None, args, None, engine=core) for core in client.core_engines
        ]
        try:
            return [answer for answers in await asyncio.gather(*calls) for answer in answers]
        except Exception as error:
            raise EngineFailed(f"{method} failed: {error}") from error

    async def mux_load(self, body: str, lora: dict[str, Any] | None = None) -> None:
        """A batch of a sync, which lies where `body` says; `lora`: it is an adapter of this config. Raises EngineFailed."""
        await self._ask("mux_load", body, lora)

    async def mux_loaded(self, version: int | None, whole: bool = True) -> None:
        """All batches of a sync are in; the weights, the whole model's or an adapter's, are of this version."""
        if whole:
            await self._ask("mux_loaded")
        await self.clear_kv_cache()
        if version is not None:
            await self.set_global_steps(version)

    def _call(self, priority: int):
        return vllm_calls.call(priority)

    def _stop_reason(self, output: TokenOutput, sampling_params: dict[str, Any], answer: dict[str, Any]) -> str | None:
        # verl's says "completed" of an end and of a spent budget.
        reason = answer.get(vllm_calls.REASON) or ("abort" if output.stop_reason == "aborted" else output.stop_reason)
        return _REASONS.get(str(reason), reason)

    async def _profile(self, folder: Path) -> None:
        await self._ask("mux_profile", str(folder))
