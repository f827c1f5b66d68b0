"""A tool that is slow in some steps, and a way of calling it for a model that has learnt nothing: every answer is a call."""

from __future__ import annotations

import asyncio

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

from verl_mux.rollout.worker.request_log import current

STEPS, SLOW_S, USUAL_S = range(9, 12), 4.0, 0.05
_STOPS = 20  # one token in so many ends an answer


@ToolParser.register("every_answer")
class EveryAnswer(ToolParser):
    @property
    def stop_token_ids(self) -> list[int]:
        return list(range(0, len(self.tokenizer), _STOPS))

    async def extract_tool_calls(self, responses_ids: list[int], tools=None) -> tuple[str, list[FunctionCall]]:
        return self.tokenizer.decode(responses_ids), [FunctionCall(name="look_up", arguments="{}")]


@function_tool
async def look_up() -> str:
    """Looks something up."""
    await asyncio.sleep(SLOW_S if current.get().step in STEPS else USUAL_S)
    return "4"
