"""A job's leases without a coordinator, which a test fences."""

from __future__ import annotations

import threading

from verl_mux.config.schema import MuxConfig
from verl_mux.coordinator.bus.client import LeaseLost, LocalMux
from verl_mux.trainer import modes

NODES = {"rollout": ["r0"], "train": ["t0"]}


class Fencing(LocalMux):
    """A local mux whose lease a test fences."""

    def __init__(self):
        super().__init__("a", NODES)
        self.usable, self.failed = threading.Event(), None
        self.usable.set()

    def guard(self, fenced):
        self.fence = fenced

    def wait_until_usable(self):
        assert self.usable.wait(60)
        if self.failed:
            raise LeaseLost(self.failed)

    def fail(self, reason):
        self.failed = reason


def made_ready(trainer, monkeypatch):
    """What `fit` needs of a trainer that went through no set-up, and that launches no samples itself."""
    trainer._mux_config = MuxConfig()
    trainer.config.actor_rollout_ref = {"rollout": {"n": 1, "max_num_seqs": 8, "val_kwargs": {"n": 1}}}
    trainer.config.data = {"max_prompt_length": 8, "max_response_length": 8}
    trainer.engines, trainer.rollout_server_manager, trainer.replay_buffer = None, None, None
    trainer.get_reward_handles = lambda: None
    monkeypatch.setattr(modes, "actors_of_rollout", lambda *others: {})
