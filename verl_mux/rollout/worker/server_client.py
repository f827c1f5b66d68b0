"""The server client that agent loops call: goes on where an abort or a round's budget stopped the engine.

Runs in agent loop workers; called by verl's agent loops; touches the load balancer and the engine servers, over Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextvars import ContextVar
from statistics import median
from typing import Any
from uuid import uuid4

from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_mux.profiling.eventlog import events
from verl_mux.rollout.engine.serving import ABORTED, LENGTH
from verl_mux.rollout.worker import request_log
from verl_mux.rollout.worker.prompt_groups import Call, Response, Stage, current

_LIMITS = ("max_tokens", "max_new_tokens")
_RETRY_S = 0.05
_RECENT = 64  # the client measures an engine's speed on its last stays
_engine_request: ContextVar[str | None] = ContextVar("verl_mux_engine_request", default=None)


class CutBeforeEngine(Exception):
    """A sample was cut off while it waited for a server."""


class MuxServerClient(LLMServerClient):
    """verl's client, with our name for a request in the engine, a note of which server has it, and the way to a planned one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._directed: set[str] = set()  # requests that the load balancer did not place

    def _vllm_request_id(self, request_id: str) -> str:
        return _engine_request.get() or super()._vllm_request_id(request_id)

    async def _acquire_server(self, request_id: str, **extra):
        response = current.get()
        target = None if response is None else response.take_target()
        if target is None:
            server_id, server = await super()._acquire_server(request_id, **extra)
        else:
            server_id, server = target
            self._directed.add(request_id)
        if response is not None:
            if not response.open.is_set():
                self._release_server(server_id, request_id=request_id)
                raise CutBeforeEngine
            response.server, response.server_id = server, server_id
        return server_id, server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        if request_id in self._directed:  # the balancer counts what it placed itself
            self._directed.discard(request_id)
        else:
            super()._release_server(server_id, request_id=request_id)


class ResponseClient:
    """Wraps a client for agent loops. What the trainer does not control (validation, plain runs) goes straight through."""

    def __init__(self, client: Any, rollout_config: Any) -> None:
        self._client, self._config = client, rollout_config
        self._token_s: deque[float] = deque(maxlen=_RECENT)

    @property
    def token_s(self) -> float | None:
        """Seconds a token of a response took lately, the median; None before any response came back."""
        return median(self._token_s) if self._token_s else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any):
        """As verl's. Tokens, log-probs and weight versions are those of all rounds together."""
        response, record = current.get(), request_log.current.get()
        if response is None:
            if record is not None:
                record.begin_turn(record.turns + 1)
                _engine_request.set(record.new_stay())
            return await request_log.engine_call(
                self._client.generate, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
            )
        prompt_ids = list(normalize_token_ids(prompt_ids))
        call = response.next_call(prompt_ids)
        if record is not None:
            record.begin_turn(response.turn)
        limit = self._limit(sampling_params, len(prompt_ids))
        params = {key: value for key, value in sampling_params.items() if key not in _LIMITS}
        while call.stop_reason is None:
            room = response.room(limit, call)
            if room <= 0:
                call.stop_reason, response.truncated = LENGTH, response.at_longest
                break
            async with request_log.parked(response):
                await response.may_generate()
            await self._stay(response, call, prompt_ids, request_id, params, room, kwargs)
        return _output(call)

    async def _stay(
        self, response: Response, call: Call, prompt_ids: list[int], request_id: str, params: dict, room: int, kwargs: dict
    ) -> None:
        """One stay in the engine."""
        asked = room if response.budget is None else min(room, response.budget)
        before, response.server_id = response.server_id, None
        record = request_log.current.get()
        name = uuid4().hex if record is None else record.new_stay()
        response.engine_request, response.stage, response.server = name, Stage.ENGINE, None
        response.entered = time.perf_counter()
        token = _engine_request.set(name)
        try:
            output = await request_log.engine_call(
                self._client.generate, request_id, prompt_ids=prompt_ids + call.token_ids,
                sampling_params={**params, "max_tokens": asked}, engine_priority=response.priority, **kwargs,
            )  # fmt: skip
        except CutBeforeEngine:
            return
        finally:
            _engine_request.reset(token)
            response.engine_request, response.stage = None, Stage.OUTSIDE
        if output.token_ids:
            self._token_s.append((time.perf_counter() - response.entered) / len(output.token_ids))
        if call.token_ids and before not in (None, response.server_id):
            request_log.note(events.REQUEST_MIGRATED, source=before, target=response.server_id, tokens=len(call.token_ids))
        call.add(list(output.token_ids), output.log_probs, int(output.extra_fields.get("global_steps") or 0))
        if response.budget is not None:
            response.budget -= len(output.token_ids)
        if output.stop_reason == ABORTED:
            if response.open.is_set():  # another abort than ours: of an engine that paused, say
                await asyncio.sleep(_RETRY_S)
        elif output.stop_reason != LENGTH or asked == room:
            call.stop_reason = output.stop_reason
            response.truncated = output.stop_reason == LENGTH and response.at_longest

    def _limit(self, sampling_params: dict[str, Any], prompt_tokens: int) -> int:
        """Most tokens of one engine call, as verl's server counts them."""
        for key in _LIMITS:
            if sampling_params.get(key) is not None:
                return int(sampling_params[key])
        response, prompt = self._config.response_length, self._config.prompt_length
        return min(response, prompt + response - prompt_tokens)


def _output(call: Call) -> TokenOutput:
    versions = [segment.version for segment in call.segments] or [0]
    extra = {"global_steps": versions[-1], "min_global_steps": min(versions), "max_global_steps": max(versions)}
    return TokenOutput(
        token_ids=list(call.token_ids), log_probs=None if call.log_probs is None else list(call.log_probs),
        stop_reason=call.stop_reason, extra_fields=extra,
    )  # fmt: skip
