"""Asks an engine's scheduler processes to release or resume tags, and reads what they answer (see scheduler_memory.py)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

from verl_mux.rollout.engine.sglang.scheduler_memory import REPORT, Answer, Ask

_BUSY_AGAIN_S = 0.05
# Aborted requests leave the engine within this time. An engine that is busy for longer runs another client's requests.
_BUSY_S = 30.0


class Refused(RuntimeError):
    """The engine has not moved the tags, and is as it was."""


class EngineFailed(RuntimeError):
    """The engine cannot be used any more."""


async def ask(manager: Any, verb: str, tags: list[str], level: int, wait_s: float) -> int:
    """Release ("sleep") or resume ("wake") these tags on all ranks. A busy engine is asked again for a while.

    manager: SGLang's tokenizer manager. Returns the bytes that went to the host to be kept, on its first rank.

    Raises:
        Refused: no room, still busy, a wrong order; nothing has changed.
        EngineFailed: a rank failed half-way, and its tags may be in any state.
    """
    manager.auto_create_handle_loop()
    kind = ReleaseMemoryOccupationReqInput if verb == "sleep" else ResumeMemoryOccupationReqInput
    send = manager.release_memory_occupation_communicator if verb == "sleep" else manager.resume_memory_occupation_communicator
    deadline = time.monotonic() + _BUSY_S
    while True:
        request = kind(tags=list(tags))
        setattr(request, REPORT, Ask(level, wait_s))
        answers = [getattr(answer, REPORT, Answer()) for answer in await send(request)]
        if any(answer.failed for answer in answers):
            raise EngineFailed("; ".join(answer.error for answer in answers if answer.error))
        errors = [answer.error for answer in answers if answer.error]
        if not errors:
            return max(answer.copied for answer in answers)
        if not any(answer.busy for answer in answers) or time.monotonic() > deadline:
            raise Refused("; ".join(dict.fromkeys(errors)))
        await asyncio.sleep(_BUSY_AGAIN_S)
