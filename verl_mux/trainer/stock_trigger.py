"""The dynamic training trigger for verl's streaming trainer modes: `mux.rollout.trigger.enable=true` with
`trainer.v1.trainer_mode=colocate_async` or `separate_async`.

The replay buffer is verl's custom sampler (`trainer.v1.sampler.custom_sampler`, set by the preflight): it hands out what is
ready when the trigger says so, at most the batch the trainer asked for. verl pads what is missing to whole mini-batches.
As many prompts as were taken are handed out next, so the number in flight, and with it the staleness, stays what it was.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import _accumulate_eviction_metrics
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_mux.config.schema import load
from verl_mux.coordinator.bus.messages import LearnerStateUpdate
from verl_mux.rollout.control.trigger import Mood, Train, TrainingTrigger, TriggerPolicy
from verl_mux.trainer.replay_buffer import MuxReplayBuffer

_MOODS = {Mood.EXPLORING: -1.0, Mood.STEADY: 0.0, Mood.CONVERGED: 1.0}


class TriggeredReplayBuffer(MuxReplayBuffer):
    """No trigger before `start`: validation before training takes whole batches anyway."""

    report_s = 0.1

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.trigger: TrainingTrigger | None = None
        self.taken = 0
        self._figures: dict[str, float] = {}

    def start(self, policy: TriggerPolicy) -> None:
        self.trigger = TrainingTrigger(policy)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """verl's, of as many prompt groups as the trigger says; 1 to `batch_size`."""
        if partition_id == "val" or self.trigger is None:
            return super().sample(global_steps, partition_id, batch_size)
        answer, metrics = self._wait(self.trigger, global_steps, partition_id)
        groups = min(answer.groups, batch_size)
        batch, more = super().sample(global_steps, partition_id, groups)
        self.taken += groups
        self._figures["groups"] = self._figures.get("groups", 0) + groups
        self._figures["waited"] = self._figures.get("waited", 0) + (answer.reason == "waited")
        return batch, metrics | more

    def _wait(self, trigger: TrainingTrigger, global_steps: int, partition_id: str) -> tuple[Train, dict]:
        metrics: dict[str, Any] = {}
        trigger.waits(time.monotonic())
        while True:
            ready, found = self.wait_for_sampleable(global_steps, partition_id, 1)
            stale = next((count for name, count in found.items() if name.endswith("/off_policy/evicted_samples")), 0)
            _accumulate_eviction_metrics(metrics, found, stale)
            trigger.ready(len(ready))
            answer = trigger.decide(time.monotonic())
            if isinstance(answer, Train):
                return answer, metrics
            self._wait_for_next_poll(partition_id, time.time())

    def take_taken(self) -> int:
        """Prompt groups handed out since the last call."""
        taken, self.taken = self.taken, 0
        return taken

    def take_figures(self) -> dict[str, float]:
        """`groups` trained on, how often it `waited` for t_max, and the thresholds and mood from here on."""
        figures, self._figures = self._figures, {}
        it = self.trigger
        return figures if it is None else {**figures, "n_min": it.n_min, "t_max_s": it.t_max_s, "mood": _MOODS[it.mood]}


def attach(trainer: PPOTrainer, agent_loop_manager: Any) -> None:
    """Let the trigger decide when this trainer trains, where its keys ask for that."""
    buffer = getattr(trainer, "replay_buffer", None)
    if not isinstance(buffer, TriggeredReplayBuffer):
        return
    buffer.start(load(trainer.config).rollout.trigger)
    buffer.workers = lambda: agent_loop_manager.agent_loop_workers
    trainer._add_batch_to_generate = lambda: trainer._add_prompts_to_generate(
        buffer.take_taken() or trainer.config.data.train_batch_size
    )
    trainer._compute_metrics = _with_feedback(trainer._compute_metrics, trainer, buffer)


def _with_feedback(method, trainer: PPOTrainer, buffer: TriggeredReplayBuffer):
    """The trigger hears of the step's entropy, and its figures join verl's metrics."""

    @functools.wraps(method)
    def computed(batch, metrics, *args, **kwargs):
        method(batch, metrics, *args, **kwargs)
        if buffer.trigger is not None and (entropy := metrics.get("actor/entropy")) is not None:
            news = LearnerStateUpdate(entropy=float(entropy), policy_version=trainer.global_steps)
            buffer.trigger.learner_state(news)
        metrics.update({f"mux/rollout/trigger/{name}": value for name, value in buffer.take_figures().items()})

    return computed
