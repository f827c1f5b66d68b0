"""verl's agent loop worker without Hydra on the way of every sample.

verl makes the agent loop object of each sample with `hydra.utils.instantiate`, which copies and merges configs for
milliseconds: measured, 40 % of what its worker does for a short request. A registered loop that is a plain class is
made directly here; any other goes through Hydra as before.
"""

from __future__ import annotations

import functools
from typing import Any

import hydra
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.rollout_trace import rollout_trace_attr

_Worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class


@functools.lru_cache(maxsize=64)
def _loop_class(target: str) -> type:
    return hydra.utils.get_class(target)


def make_agent_loop(entry: Any, **arguments: Any) -> Any:
    """The agent loop of a registry entry, as `hydra.utils.instantiate(config=entry, **arguments)` makes it."""
    if isinstance(entry, dict) and set(entry) == {"_target_"}:
        return _loop_class(entry["_target_"])(**arguments)
    return hydra.utils.instantiate(config=entry, **arguments)


class DirectAgentLoopWorker(_Worker):
    """verl's worker of the V1 trainer, with `make_agent_loop`."""

    async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name: str, trace: bool = True, **kwargs):
        where = {key: trajectory[key] for key in ("step", "sample_index", "rollout_n", "validate")}
        with rollout_trace_attr(**where, name="agent_loop", trace=trace):
            if agent_name not in _agent_loop_registry:
                raise ValueError(f"agent loop {agent_name!r} is not registered; there are {', '.join(_agent_loop_registry)}")
            agent_loop = make_agent_loop(
                _agent_loop_registry[agent_name],
                trainer_config=DictConfigWrap(config=self.config),
                server_manager=self.llm_client,
                tokenizer=self.tokenizer,
                processor=self.processor,
                hf_model_type=self.hf_model_type,
                dataset_cls=self.dataset_cls,
                data_config=DictConfigWrap(self.config.data),
                tools=ToolListWrap(self.tools),
            )
            output = await agent_loop.run(sampling_params, **kwargs)
            return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)
