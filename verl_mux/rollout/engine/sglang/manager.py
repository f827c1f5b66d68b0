"""What our server does with SGLang's tokenizer manager beside verl: priorities and figures of requests, stalls, sleep and wake.

Runs in the server's process; called by server.py. Touches the manager's own functions, which `install` wraps, and its processes'
answers. A request's priority and figures go through a context variable that its asyncio task carries into the manager, since verl
0.9's server passes neither in nor out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch

from verl_mux.rollout.engine.serving import EngineFailed, Refused, StallWatch
from verl_mux.rollout.engine.sglang.scheduler_log import TIMES
from verl_mux.rollout.engine.sglang.scheduler_lora import LORA_FORMAT
from verl_mux.rollout.engine.sglang.scheduler_memory import REPORT, Answer, Ask

# What the event log has of a stay: the scheduler's times, then what SGLang's answer has (our key -> SGLang's).
OF_ANSWER = {
    "cached_tokens": "cached_tokens",
    "retractions": "num_retractions",
    "drafted_tokens": "spec_num_proposed_drafts",
    "accepted_tokens": "spec_num_correct_drafts",
}
FIGURES = ("queue_sec", "prefill_sec", "decode_sec", *OF_ANSWER)
_PROFILED_PASSES = 5
_BUSY_AGAIN_S = 0.05
# Aborted requests leave the engine within this time of its first answer, before which it may have stood still. An engine that is
# busy for longer runs another client's requests.
_BUSY_S = 30.0


class _Request(NamedTuple):
    priority: int
    answer: dict[str, Any]


_current: ContextVar[_Request | None] = ContextVar("verl_mux_engine_call", default=None)


@contextlib.contextmanager
def priority(value: int) -> Iterator[dict[str, Any]]:
    """Requests of this block have this priority, higher first. Yields a dict that gets FIGURES of the answer, where known."""
    request = _Request(value, {})
    before = _current.set(request)
    try:
        yield request.answer
    finally:
        _current.reset(before)


def install(manager: Any, stalls: StallWatch) -> None:
    """Wrap `generate_request` of SGLang's tokenizer manager, and where it takes what its scheduler sends: every 50 tokens of a
    request, and at its end. `stalls`: gets these signs of life."""
    generate_request, handle_output = manager.generate_request, manager._handle_batch_output
    times: dict[str, dict[str, float]] = {}  # of requests whose answer is on its way

    async def with_priority(request, *args, **kwargs):
        call = _current.get()
        if manager.server_args.enable_priority_scheduling:
            request.priority = call.priority if call else 0
        async for output in generate_request(request, *args, **kwargs):
            meta = output.get("meta_info") or {}
            if call is not None:
                call.answer.update({ours: meta.get(theirs) for ours, theirs in OF_ANSWER.items()})
                call.answer.update(times.pop(str(meta.get("id")), {}))
            if (meta.get("finish_reason") or {}).get("type") == "abort":
                # SGLang keeps the name of a request that was aborted in its queue, and refuses it when it comes again; and it
                # counts the request among those that use their adapter, which it then never lets go.
                kept = manager.rid_to_state.pop(meta.get("id"), None)
                if kept is not None and kept.obj.lora_id:
                    await manager.lora_registry.release(kept.obj.lora_id)
            yield output

    async def with_times(received):
        stalls.sent(time.monotonic())
        times.update(_times(received))
        await handle_output(received)

    manager.generate_request = with_priority
    manager._handle_batch_output = with_times


def _times(received: Any) -> dict[str, dict[str, float]]:
    """By name, of the requests that end with this output."""
    sent, reasons = getattr(received, "time_stats", None), getattr(received, "finished_reasons", None)
    ended = zip(received.rids, sent or (), reasons or (), strict=False)
    return {name: times for name, stats, reason in ended if reason is not None and (times := getattr(stats, TIMES, None))}


async def profile(manager: Any, folder: Path) -> None:
    """A profile of the next forward passes, by torch, into `folder`. Returns when the engine has answered, so not before a stall
    is over."""
    activities = ["CPU", "GPU"] if torch.cuda.is_available() else ["CPU"]
    await manager.start_profile(output_dir=str(folder), num_steps=_PROFILED_PASSES, activities=activities, with_stack=False)


# ---------------------------------------------------------------- whether an aborted response had ended


def has_ended(token_ids: Sequence[int], sampling_params: dict[str, Any], eos_token_ids: Collection[int]) -> bool:
    """Did an abort cross a response's end? The engine would write past its end of sequence if it went on."""
    stops = set(sampling_params.get("stop_token_ids") or ())
    if not sampling_params.get("ignore_eos"):
        stops.update(eos_token_ids)
    return bool(token_ids) and token_ids[-1] in stops


def eos_token_ids(manager: Any) -> set[int]:
    """As SGLang's scheduler has them: of the model's config, and of the tokenizer."""
    ids = set(manager.model_config.hf_eos_token_id or ())
    if manager.tokenizer is not None:
        ids.update(getattr(manager.tokenizer, "additional_stop_token_ids", None) or ())
        ids |= {manager.tokenizer.eos_token_id} - {None}
    return ids


# ---------------------------------------------------------------- sleep and wake


async def move(manager: Any, verb: str, tags: list[str], level: int, wait_s: float) -> int:
    """Release ("sleep") or resume ("wake") these tags on all ranks. A busy engine is asked again for a while.

    Returns the bytes that went to the host to be kept, on its first rank.

    Raises:
        Refused: no room, still busy, a wrong order; nothing has changed.
        EngineFailed: a rank failed half-way, and its tags may be in any state.
    """
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

    manager.auto_create_handle_loop()
    kind = ReleaseMemoryOccupationReqInput if verb == "sleep" else ResumeMemoryOccupationReqInput
    send = manager.release_memory_occupation_communicator if verb == "sleep" else manager.resume_memory_occupation_communicator
    busy_since: float | None = None
    while True:
        request = kind(tags=list(tags))
        setattr(request, REPORT, Ask(level, wait_s))
        answers = [getattr(answer, REPORT, Answer()) for answer in await send(request)]
        errors = [answer.error for answer in answers if answer.error]
        if any(answer.failed for answer in answers):
            raise EngineFailed("; ".join(errors))
        if not errors:
            return max(answer.copied for answer in answers)
        busy_since = time.monotonic() if busy_since is None else busy_since
        if not any(answer.busy for answer in answers) or time.monotonic() > busy_since + _BUSY_S:
            raise Refused("; ".join(dict.fromkeys(errors)))
        await asyncio.sleep(_BUSY_AGAIN_S)


async def load_lora(manager: Any, body: str, lora: dict[str, Any]) -> None:
    """Serve the adapter that lies where `body` says (scheduler_lora.py) in the place of the last one. Raises EngineFailed."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput, UnloadLoRAAdapterReqInput
    from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME as NAME

    try:
        if NAME in manager.lora_registry.get_all_adapters():
            await asyncio.wait_for(manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(NAME)), _BUSY_S)
    except asyncio.TimeoutError:
        raise EngineFailed(f"requests use the last adapter for more than {_BUSY_S:g} s") from None
    loaded = await manager.load_lora_adapter_from_tensors(
        LoadLoRAAdapterFromTensorsReqInput(NAME, lora, serialized_tensors=body, load_format=LORA_FORMAT)
    )
    if not loaded.success:
        raise EngineFailed(f"the adapter could not be loaded: {loaded.error_message}")
