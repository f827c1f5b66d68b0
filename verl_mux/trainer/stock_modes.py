"""verl's own trainer modes with keys of ours: the event log, and the training trigger of the streaming modes.

Runs in the trainer's driver. modes.py imports this file, which wraps `fit` of every verl trainer; without such keys nothing else
is touched. Requests are logged by our agent loop manager, which the preflight puts in place.

`TriggeredReplayBuffer` is verl's custom sampler (`trainer.v1.sampler.custom_sampler`, set by the preflight) in the streaming
modes with `mux.rollout.trigger.n_min`: when the trigger says so it returns what is ready, at most the batch that the trainer
asked for; verl pads what is missing to whole mini-batches. Next, as many prompts are launched as were taken, so the number under
way, and with it the staleness, stays what it was.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import _accumulate_eviction_metrics
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_mux.config.completion import logged_keys
from verl_mux.config.job_checks import load
from verl_mux.coordinator.bus.messages import LearnerStateUpdate
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.step_metrics import metrics_of_step
from verl_mux.rollout.control.trigger import Mood, Train, TrainingTrigger
from verl_mux.trainer.replay_buffer import MuxReplayBuffer
from verl_mux.worker_settings import WorkerSettings, open_worker_log

_PARTS = {
    "_compute_old_log_prob": events.OLD_LOG_PROB, "_compute_ref_log_prob": events.REF, "_compute_values": events.VALUES,
    "_compute_advantage": events.ADV, "_update_critic": events.UPDATE_CRITIC, "_update_actor": events.UPDATE_ACTOR,
    "_save_checkpoint": events.SAVE_CHECKPOINT, "_validate": events.VALIDATE, "on_sample_end": events.SLEEP,
    "on_step_end": events.SYNC, "step": events.STEP,
}  # fmt: skip
_MOODS = {Mood.EXPLORING: -1.0, Mood.STEADY: 0.0, Mood.CONVERGED: 1.0}


def instrument(trainer: PPOTrainer) -> Any | None:
    """Log the parts of this trainer's steps; the log, or None where no key asks for it."""
    mode = str(trainer.config.trainer.v1.trainer_mode)
    settings = WorkerSettings.from_rollout_config(trainer.config.actor_rollout_ref.rollout)
    if mode.startswith("mux_") or not OmegaConf.select(trainer.config, "mux") or not settings.events_dir:
        return None
    log = open_worker_log(settings, "trainer", 0)
    log.log(events.JOB_KEYS, extra={"keys": logged_keys(trainer.config)}, step=0)

    def timed(method: Callable, event: str) -> Callable:
        @functools.wraps(method)
        def logged(*args: Any, **kwargs: Any) -> Any:
            with log.span(event, step=trainer.global_steps):
                return method(*args, **kwargs)

        return logged

    for name, event in _PARTS.items():
        setattr(trainer, name, timed(getattr(trainer, name), event))
    sample, compute_metrics = trainer.replay_buffer.sample, trainer._compute_metrics
    timed_sample = timed(sample, events.SAMPLE_WAIT)

    def sampled(global_steps: int, partition_id: str, batch_size: int) -> Any:
        """The trainer's wait for its samples; a validation's is part of the validation."""
        return (sample if partition_id == "val" else timed_sample)(global_steps, partition_id, batch_size)

    def computed(batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> None:
        """The figures that the log gives for the step join verl's own."""
        compute_metrics(batch, metrics, *args, **kwargs)
        metrics.update(metrics_of_step(log, trainer.global_steps))

    trainer.replay_buffer.sample, trainer._compute_metrics = sampled, computed
    return log


class TriggeredReplayBuffer(MuxReplayBuffer):
    """`trigger`: None before `attach_trigger`; validation before training takes whole batches anyway. `taken`: prompt groups
    returned since the trainer last launched some."""

    report_s = 0.1

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.trigger: TrainingTrigger | None = None
        self.taken = 0
        self._figures: Counter[str] = Counter()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """verl's, of as many prompt groups as the trigger says; 1 to `batch_size`."""
        if partition_id == "val" or self.trigger is None:
            return super().sample(global_steps, partition_id, batch_size)
        answer, metrics = self._wait(self.trigger, global_steps, partition_id)
        groups = min(answer.groups, batch_size)
        batch, more = super().sample(global_steps, partition_id, groups)
        self.taken += groups
        self._figures.update(groups=groups, waited=int(answer.reason == "waited"))
        return batch, metrics | more

    def _wait(self, trigger: TrainingTrigger, global_steps: int, partition_id: str) -> tuple[Train, dict]:
        metrics: dict[str, Any] = {}
        trigger.waits(time.monotonic())
        while True:
            ready, more = self.wait_for_sampleable(global_steps, partition_id, 1)
            stale = next((count for name, count in more.items() if name.endswith("/off_policy/evicted_samples")), 0)
            _accumulate_eviction_metrics(metrics, more, stale)
            trigger.ready(len(ready))
            answer = trigger.decide(time.monotonic())
            if isinstance(answer, Train):
                return answer, metrics
            self._wait_for_next_poll(partition_id, time.time())

    def take_figures(self) -> dict[str, float]:
        """`groups` trained on, how often it `waited` for t_max, and the thresholds and mood from here on."""
        figures, self._figures, it = self._figures, Counter(), self.trigger
        return {} if it is None else {**figures, "n_min": it.n_min, "t_max_s": it.t_max_s, "mood": _MOODS[it.mood]}


def attach_trigger(trainer: PPOTrainer, agent_loop_manager: Any) -> None:
    """Let the trigger decide when this trainer trains, where its keys ask for that; at the start of verl's `fit`."""
    buffer = getattr(trainer, "replay_buffer", None)
    if not isinstance(buffer, TriggeredReplayBuffer):
        return
    keys = load(trainer.config).rollout.trigger
    assert keys.n_min is not None, "the preflight sets this sampler only then"
    trigger = buffer.trigger = TrainingTrigger(keys.n_min, keys.t_max_s, keys.entropy)
    buffer.start(agent_loop_manager.agent_loop_workers)
    buffer.filter_groups_metric = trainer._resolve_filter_groups_metric()  # verl gives it to its own buffers alone
    compute_metrics = trainer._compute_metrics

    def as_many_as_were_taken() -> None:
        count, buffer.taken = buffer.taken or trainer.config.data.train_batch_size, 0
        trainer._add_prompts_to_generate(count)

    def with_feedback(batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> None:
        """The trigger gets the step's entropy, and its figures join verl's metrics."""
        compute_metrics(batch, metrics, *args, **kwargs)
        if (entropy := metrics.get("actor/entropy")) is not None:
            trigger.learner_state(LearnerStateUpdate(entropy=float(entropy), policy_version=trainer.global_steps))
        metrics.update({f"mux/rollout/trigger/{name}": value for name, value in buffer.take_figures().items()})

    trainer._add_batch_to_generate, trainer._compute_metrics = as_many_as_were_taken, with_feedback


def _wrap(fit: Callable) -> Callable:
    @functools.wraps(fit)
    def with_our_keys(self, *args: Any, **kwargs: Any) -> Any:
        log = instrument(self)
        attach_trigger(self, *args, **kwargs)
        try:
            return fit(self, *args, **kwargs)
        finally:
            if log is not None:
                log.close()

    vars(with_our_keys)["verl_mux"] = True
    return with_our_keys


if not getattr(PPOTrainer.fit, "verl_mux", False):
    PPOTrainer.fit = _wrap(PPOTrainer.fit)
