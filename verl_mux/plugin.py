"""The one door verl comes through: entry point `verl.plugins`, loaded (never called) by every `import verl`.

Every process that imports verl pays its whole cost, and verl hides its failures at DEBUG level; so it registers hooks only: our
classes are imported when verl imports the registry they belong to. `verl-mux doctor` says whether all of it is in place.
"""

from __future__ import annotations

import logging

from verl_mux.post_import import after_import

logger = logging.getLogger(__name__)

# verl module -> ours, imported right after it; ours registers itself with verl's own registry at import.
REGISTRATIONS = {
    "hydra": "verl_mux.config.search_path",
    "verl.trainer.ppo.v1": "verl_mux.trainer.modes",
    "verl.checkpoint_engine": "verl_mux.sync.engine",
    "verl.utils.config": "verl_mux.config.validation_hook",
    "transfer_queue.interface": "verl_mux.config.queue_namespace",
}
# actor_rollout_ref.rollout.name -> where our record of that engine is; read by verl_mux/rollout/engine/record.py.
ENGINES = {
    "sglang": "verl_mux.rollout.engine.sglang.sglang_record",
    "vllm": "verl_mux.rollout.engine.vllm.vllm_record",
}
# What a job's config names to verl, which imports it in the process that needs it.
AGENT_LOOP_MANAGER = "verl_mux.rollout.worker.agent_loop.MuxAgentLoopManager"
REPLAY_BUFFER = {"path": "pkg://verl_mux.trainer.replay_buffer", "name": "MuxReplayBuffer"}
TRIGGERED_BUFFER = {"path": "pkg://verl_mux.trainer.stock_modes", "name": "TriggeredReplayBuffer"}


def register() -> None:
    """Register everything of ours with verl and Hydra. Idempotent, imports neither torch nor ray by itself."""
    for upstream, ours in REGISTRATIONS.items():
        after_import(upstream, ours)


try:
    register()
except Exception:
    # verl swallows this at DEBUG level; say it where the user sees it.
    logger.exception("verl_mux could not register with verl; its trainer modes will be unknown")
    raise
