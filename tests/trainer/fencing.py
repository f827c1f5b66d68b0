"""A job's leases without a coordinator, which a test fences; a trainer and a replay buffer that went through no set-up."""

from __future__ import annotations

import threading

from omegaconf import OmegaConf

from verl_mux.config.schema import MuxConfig
from verl_mux.coordinator.bus.client import LeaseLost, LocalMux
from verl_mux.trainer import job_hosts
from verl_mux.trainer.job_hosts import HostWatch
from verl_mux.trainer.modes import PPOTrainerMuxSeparate
from verl_mux.trainer.phases import Leaving
from verl_mux.trainer.replay_buffer import MuxReplayBuffer
from verl_mux.trainer.replica_moves import ReplicaMoves
from verl_mux.worker_settings import WorkerSettings

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


def bare_trainer(nodes=NODES, **attributes) -> PPOTrainerMuxSeparate:
    """A trainer at step 1 of 9, on these nodes, that went through no set-up."""
    made = object.__new__(PPOTrainerMuxSeparate)
    made.settings = WorkerSettings(rollout_nodes=tuple(nodes["rollout"]), train_nodes=tuple(nodes["train"]))
    made.global_steps, made.total_training_steps, made.rollout, made.moves = 1, 9, None, ReplicaMoves()
    made.leaving, made.hosts = Leaving(LocalMux("a", nodes), None), HostWatch({}, 0.0, print)
    vars(made).update(attributes)
    return made


def made_buffer(kind: type = MuxReplayBuffer, trainer_mode: str = "mux_separate") -> MuxReplayBuffer:
    """As verl makes it."""
    more = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop", "sampler_kwargs": None, "refill_fn": None}
    return kind(trainer_mode=trainer_mode, trainer_config=OmegaConf.create(), **more)


def made_ready(trainer, monkeypatch):
    """What `fit` needs of a trainer that went through no set-up, and that launches no samples itself."""
    trainer._mux_config = MuxConfig()
    trainer.config.actor_rollout_ref = {"rollout": {"n": 1, "max_num_seqs": 8, "val_kwargs": {"n": 1}}}
    trainer.config.data = {"max_prompt_length": 8, "max_response_length": 8}
    trainer.engines, trainer.rollout_server_manager, trainer.replay_buffer = None, None, None
    trainer.get_reward_handles, trainer.reward_loop_manager, trainer.teacher_model_manager = lambda: None, None, None
    monkeypatch.setattr(job_hosts, "actors_of_rollout", lambda *others: {})
