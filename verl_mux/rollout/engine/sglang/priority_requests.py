"""SGLang's request priority and prefix-cache hits, which verl 0.9's server passes neither in nor out.

Both go through context variables that the request's asyncio task carries into SGLang's tokenizer manager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_priority: ContextVar[int] = ContextVar("verl_mux_priority", default=0)
_answer: ContextVar[dict[str, Any] | None] = ContextVar("verl_mux_answer", default=None)


@contextlib.contextmanager
def priority(value: int) -> Iterator[dict[str, Any]]:
    """Requests of this block have this priority, higher first. Yields a dict that gets `cached_tokens` of the answer."""
    answer: dict[str, Any] = {}
    before, answered = _priority.set(value), _answer.set(answer)
    try:
        yield answer
    finally:
        _priority.reset(before)
        _answer.reset(answered)


def install(tokenizer_manager: Any) -> None:
    """Wrap `generate_request` of SGLang's tokenizer manager."""
    generate_request = tokenizer_manager.generate_request

    async def with_priority(request, *args, **kwargs):
        if tokenizer_manager.server_args.enable_priority_scheduling:
            request.priority = _priority.get()
        async for output in generate_request(request, *args, **kwargs):
            answer = _answer.get()
            if answer is not None:
                answer["cached_tokens"] = (output.get("meta_info") or {}).get("cached_tokens")
            yield output

    tokenizer_manager.generate_request = with_priority
