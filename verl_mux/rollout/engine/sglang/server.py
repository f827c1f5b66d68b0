"""verl's SGLang server as ours: what SGLang does its own way. Runs in an actor of its own; the rest is ../engine_server.py's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.utils.device import get_device_name
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from verl_mux.memory.tags import CUDA_GRAPH, WEIGHTS
from verl_mux.platform.choose import cpu_part
from verl_mux.platform.cuda_packages import with_torchs_runtime
from verl_mux.rollout.engine.engine_server import EngineServer
from verl_mux.rollout.engine.serving import ABORTED, STOPPED
from verl_mux.rollout.engine.sglang import manager, scheduler_log
from verl_mux.rollout.engine.sglang.plugin import ENGINE_MARK, SEEDED_VARIABLE


class MuxSGLangHttpServer(EngineServer, SGLangHttpServer):
    """Each tag moves by itself, by SGLang's own requests."""

    figures = manager.FIGURES

    def _first_device(self) -> int:
        return self.base_gpu_id or 0

    def _prepare(self) -> None:
        # Free memory differs between GPUs as long as other jobs share them, and it is measured again behind the gate.
        os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        self._sleeping_graphs = get_device_name() == "cuda" and not self.config.enforce_eager
        if self._sleeping_graphs:
            os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
            # A graph over memory that came back must not use NCCL's registration of what was there before.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        if get_device_name() == "cuda":
            # Of the schedulers, which start with torch_memory_saver's library before Python.
            os.environ.update(with_torchs_runtime(os.environ))
        elif get_device_name() == "cpu":
            os.environ.update(cpu_part("engine_environment")(self.replica_world_size))
        os.environ[ENGINE_MARK] = "1"
        os.environ[SEEDED_VARIABLE] = "1" if self._settings.seeded_sampling else "0"
        scheduler_log.ask_for(self._settings, self.replica_rank, self._node())

    def _launched(self) -> None:
        manager.install(self.tokenizer_manager, self._stalls)
        self._eos_token_ids = manager.eos_token_ids(self.tokenizer_manager)

    async def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.tokenizer_manager.abort_request(rid=request_id)

    async def _carry_out(self, verb: str, tag: str, level: int) -> None:
        tags = [tag, CUDA_GRAPH] if tag == WEIGHTS and self._sleeping_graphs else [tag]
        await manager.move(self.tokenizer_manager, verb, tags, level, self._settings.device.wake_wait_s)

    async def mux_load_lora(self, body: str, lora: dict[str, Any]) -> None:
        """The adapter of a sync, which lies where `body` says. Raises EngineFailed."""
        await manager.load_lora(self.tokenizer_manager, body, lora)

    def _call(self, priority: int):
        return manager.priority(priority)

    def _stop_reason(self, output: TokenOutput, sampling_params: dict[str, Any], answer: dict[str, Any]) -> str | None:
        if output.stop_reason == ABORTED and manager.has_ended(output.token_ids, sampling_params, self._eos_token_ids):
            return STOPPED
        return output.stop_reason

    async def _profile(self, folder: Path) -> None:
        await manager.profile(self.tokenizer_manager, folder)
