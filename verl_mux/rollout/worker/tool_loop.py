"""verl's tool agent loop with one event a tool call. Takes the place of `tool_agent` in our agent loop workers."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from verl_mux.profiling.eventlog import events
from verl_mux.rollout.worker.request_log import part


class MuxToolAgentLoop(ToolAgentLoop):
    """Times each tool call."""

    async def _call_tool(self, tool_call: Any, *args: Any, **kwargs: Any) -> Any:
        with part(events.TOOL_EXECUTION, tool=getattr(tool_call, "name", None)):
            return await super()._call_tool(tool_call, *args, **kwargs)
