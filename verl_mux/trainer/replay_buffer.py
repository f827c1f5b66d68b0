"""verl's replay buffer, woken by the agent loop workers; and the one that waits for the training trigger.

Runs in the trainer's driver; called by verl's trainer loop where it asks for a step's samples. Touches verl's TransferQueue and
asks the agent loop workers over Ray.

`TriggeredReplayBuffer` serves verl's streaming modes (`trainer.v1.trainer_mode=colocate_async` or `separate_async`) with
`mux.rollout.trigger.n_min`. It is verl's custom sampler (`trainer.v1.sampler.custom_sampler`, set by the preflight): it hands out
what is ready when the trigger says so, at most the batch the trainer asked for; verl pads what is missing to whole mini-batches.
As many prompts as were taken are handed out next, so the number in flight, and with it the staleness, stays what it was.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync, _accumulate_eviction_metrics
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_mux.config.job_checks import load
from verl_mux.coordinator.bus.client import LocalMux
from verl_mux.coordinator.bus.messages import LearnerStateUpdate
from verl_mux.rollout.control.trigger import Mood, Train, TrainingTrigger
from verl_mux.trainer.job_hosts import ActorWatch
from verl_mux.trainer.step_rollout import StepRollout

_MOODS = {Mood.EXPLORING: -1.0, Mood.STEADY: 0.0, Mood.CONVERGED: 1.0}


class MuxReplayBuffer(ReplayBufferAsync):
    """Waits on completions; verl's own polls every 2 s, which is most of a small step and a device's idle time in any.

    Returns samples in the order in which their prompts were drawn: completion order depends on what else the machine does, and
    gradients must not.
    """

    report_s = 0.5  # how often progress is reported while nothing completes

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._workers: Sequence[Any] = ()
        self._mux: LocalMux | None = None
        self._watch: ActorWatch | None = None
        self._rollout: StepRollout | None = None
        self._samples_of_prompt: dict[str, int] = {}  # by partition
        self._order: dict[str, int] = {}
        self._next = 0
        self._settled: dict[int, int] = {}
        self._wanted = 0  # samples of the batch that is waited for

    def start(
        self, workers: Sequence[Any], mux: LocalMux | None = None, watch: ActorWatch | None = None,
        rollout: StepRollout | None = None, samples_of_prompt: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Before the first sample. workers: the agent loop workers. mux: hears of progress. watch: raises where an actor died.
        rollout: where it, and not verl, launches samples. samples_of_prompt: by partition, for progress."""
        self._workers, self._mux, self._watch, self._rollout = workers, mux, watch, rollout
        self._samples_of_prompt = samples_of_prompt or {}

    def submitted(self, uids: list[str]) -> None:
        """Remember the order in which prompts were drawn."""
        for uid in uids:
            self._order[uid] = self._next
            self._next += 1

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """verl's, or the groups that the step's rollout calls complete; validation is always verl's."""
        if partition_id == "val" or self._rollout is None:
            self._wanted = batch_size * self._samples_of_prompt.get(partition_id, 1)
            sampled = super().sample(global_steps, partition_id, batch_size)
            self.report_progress(self._wanted)
            return sampled
        groups = self._rollout.run()
        self._sync_metadata_from_transfer_queue()
        batch = self._materialize_batch(partition_id, groups, dict(self.partitions[partition_id]))
        there = {key.split("_")[0] for key in batch.keys}
        if missing := [uid for uid in groups if uid not in there]:
            raise RuntimeError(f"step {global_steps}: prompt group {missing[0]} is complete but has no trajectory")
        return batch, {}

    def report_progress(self, done: int) -> None:
        """Samples of the batch that is waited for. Raises DeadActor where an actor died that the rollout needs: the job would
        keep its nodes for ever."""
        if self._watch is not None:
            self._watch.check()
        if self._mux is not None:
            self._mux.progress(done, self._wanted)

    def clear_groups(self, uids: set[str], partition_id: str = "train") -> None:
        """Forget prompt groups that were given up."""
        self._sync_metadata_from_transfer_queue()
        self._clear_groups(partition_id, uids)

    def waiting_groups(self, partition_id: str = "train") -> list[str]:
        """Prompt groups that were drawn and not trained, nor given up."""
        self._sync_metadata_from_transfer_queue()
        return list(self.prompt_global_steps[partition_id])

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        super()._clear_groups(partition_id, uids)
        self._forget_order(uids)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        # What was trained or validated has left the partition; a sample may have several trajectories there.
        done = {key.rsplit("_", 1)[0] for key in self.partitions[partition_id]}
        self.report_progress(min(len(done), self._wanted))
        refs = [w.wait_progress.remote(self._settled.get(i, 0), self.report_s) for i, w in enumerate(self._workers)]
        # The first answer is enough: a worker that has settled everything answers only when its time is up.
        answered, _ = ray.wait(refs, num_returns=1)
        for i, report in ((refs.index(ref), ray.get(ref)) for ref in answered):
            if report.settled == report.prompts:
                self._settled[i] = report.settled
        return last_debug_time

    def _select_prompt_uids(self, partition_id, sampleable_keys, batch_size):
        uids, partition, steps = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        return sorted(uids, key=lambda uid: self._order.get(uid, 0)), partition, steps

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        batch.reorder(sorted(range(len(batch.keys)), key=lambda i: self._rank(batch.keys[i])))
        self._forget_order(selected_prompt_uids)
        return batch

    def _forget_order(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._order.pop(uid, None)

    def _rank(self, key: str) -> tuple[int, int, int]:
        uid, session, index = key.rsplit("_", 2)
        return self._order.get(uid, 0), int(session), int(index)


class TriggeredReplayBuffer(MuxReplayBuffer):
    """No trigger before `use`: validation before training takes whole batches anyway."""

    report_s = 0.1

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.trigger: TrainingTrigger | None = None
        self._taken = 0
        self._figures: dict[str, float] = {}

    def use(self, trigger: TrainingTrigger) -> None:
        """From now on the trigger decides."""
        self.trigger = trigger

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """verl's, of as many prompt groups as the trigger says; 1 to `batch_size`."""
        if partition_id == "val" or self.trigger is None:
            return super().sample(global_steps, partition_id, batch_size)
        answer, metrics = self._wait(self.trigger, global_steps, partition_id)
        groups = min(answer.groups, batch_size)
        batch, more = super().sample(global_steps, partition_id, groups)
        self._taken += groups
        self._figures["groups"] = self._figures.get("groups", 0) + groups
        self._figures["waited"] = self._figures.get("waited", 0) + (answer.reason == "waited")
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

    def take_taken(self) -> int:
        """Prompt groups handed out since the last call."""
        taken, self._taken = self._taken, 0
        return taken

    def take_figures(self) -> dict[str, float]:
        """`groups` trained on, how often it `waited` for t_max, and the thresholds and mood from here on."""
        figures, self._figures = self._figures, {}
        it = self.trigger
        return figures if it is None else {**figures, "n_min": it.n_min, "t_max_s": it.t_max_s, "mood": _MOODS[it.mood]}


def attach_trigger(trainer: PPOTrainer, agent_loop_manager: Any) -> None:
    """Let the trigger decide when this trainer trains, where its keys ask for that; at the start of verl's `fit`."""
    buffer = getattr(trainer, "replay_buffer", None)
    if not isinstance(buffer, TriggeredReplayBuffer):
        return
    keys = load(trainer.config).rollout.trigger
    assert keys.n_min is not None, "the preflight sets this sampler only then"
    buffer.use(TrainingTrigger(keys.n_min, keys.t_max_s, keys.entropy))
    buffer.start(agent_loop_manager.agent_loop_workers)
    trainer._add_batch_to_generate = lambda: trainer._add_prompts_to_generate(
        buffer.take_taken() or trainer.config.data.train_batch_size
    )
    compute_metrics = trainer._compute_metrics

    @functools.wraps(compute_metrics)
    def with_feedback(batch, metrics, *args, **kwargs):
        """The trigger gets the step's entropy, and its figures join verl's metrics."""
        compute_metrics(batch, metrics, *args, **kwargs)
        if buffer.trigger is not None and (entropy := metrics.get("actor/entropy")) is not None:
            buffer.trigger.learner_state(LearnerStateUpdate(entropy=float(entropy), policy_version=trainer.global_steps))
        metrics.update({f"mux/rollout/trigger/{name}": value for name, value in buffer.take_figures().items()})

    trainer._compute_metrics = with_feedback
