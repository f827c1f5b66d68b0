"""verl's replay buffer, woken by the agent loop workers instead of polling.

Runs in the trainer's driver; called by verl's trainer loop where it asks for a step's samples. Touches verl's TransferQueue and
asks the agent loop workers over Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBuffer, ReplayBufferAsync

from verl_mux.coordinator.bus.client import LocalMux
from verl_mux.errors import Failure
from verl_mux.trainer.job_hosts import ActorWatch
from verl_mux.trainer.prompts import ALL_FAIL, FAILED_STEPS, TOO_MANY_FILTERED
from verl_mux.trainer.step_rollout import StepRollout


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
        self._failed = 0  # groups, one after the other
        self._drains = False  # see replace_filtered
        self._filtered: Counter[float] = Counter()  # groups of this step without a signal, by the value that all have

    def start(
        self, workers: Sequence[Any], mux: LocalMux | None = None, watch: ActorWatch | None = None,
        rollout: StepRollout | None = None, samples_of_prompt: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Before the first sample. workers: the agent loop workers. mux: hears of progress. watch: raises where an actor died.
        rollout: where it, and not verl, launches samples. samples_of_prompt: by partition, for progress."""
        self._workers, self._mux, self._watch, self._rollout = workers, mux, watch, rollout
        self._samples_of_prompt = samples_of_prompt or {}

    def replace_filtered(self, metric: str, train_batch_size: int, batches_at_once: int) -> None:
        """Groups whose samples all have the same `metric` are replaced, as verl's `sync` does it: two for one, at most
        `batches_at_once` batches of prompts under way, and nothing under way when the batch is there."""
        self.filter_groups_metric, self.train_batch_size, self.gen_batch_size = metric, train_batch_size, 1
        self.max_inflight_gen_batches, self._drains = batches_at_once, True

    def submitted(self, uids: list[str]) -> None:
        self._order |= {uid: self._next + at for at, uid in enumerate(uids)}
        self._next += len(uids)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """verl's, or the groups that the step's rollout calls complete; validation is always verl's."""
        if partition_id == "val" or self._rollout is None:
            self._wanted = batch_size * self._samples_of_prompt.get(partition_id, 1)
            how = ReplayBuffer.sample if self._drains else ReplayBufferAsync.sample
            sampled = how(self, global_steps, partition_id, batch_size)
            self.report_progress(self._wanted)
            return sampled
        groups = self._rollout.run()
        self._sync_metadata_from_transfer_queue()
        batch = self._materialize_batch(partition_id, groups, dict(self.partitions[partition_id]))
        there = {key.split("_")[0] for key in batch.keys}
        if missing := [uid for uid in groups if uid not in there]:
            raise RuntimeError(f"step {global_steps}: prompt group {missing[0]} is complete but has no trajectory")
        filtered, self._filtered = self._filtered, Counter()
        names = f"{self._metrics_prefix(partition_id)}/filter_groups/evicted_samples", DAPO_FILTERED_REWARD_COUNTS_KEY
        return batch, dict(zip(names, (filtered.total(), dict(filtered)), strict=True)) if filtered else {}

    def is_filtered(self, group: str, partition_id: str = "train") -> bool:
        """Is this prompt group, which is complete, without a signal? It is counted."""
        if self.filter_groups_metric is None:
            return False
        self._sync_metadata_from_transfer_queue()
        found, _ = self._dapo_filtered_keys(partition_id)
        if group in found:
            self._filtered[self._dapo_classification_cache[partition_id][group]] += 1
        return group in found

    def report_progress(self, done: int) -> None:
        """Samples of the batch that is waited for. Raises DeadActor."""
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
        failed = uids & self.failure_keys[partition_id]
        self._failed = 0 if self.finished_keys[partition_id] else self._failed + len(failed)
        if self._failed >= FAILED_STEPS * max(self._wanted // self._samples_of_prompt.get(partition_id, 1), 1):
            raise Failure(ALL_FAIL.format(self._failed))
        super()._clear_groups(partition_id, uids)
        self._forget_order(uids)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        if self._drains and partition_id != "val" and not (self.pending_keys[partition_id] or self.running_keys[partition_id]):
            raise Failure(TOO_MANY_FILTERED)
        # What was trained or validated has left the partition; a sample may have several trajectories there.
        done = {key.rsplit("_", 1)[0] for key in self.partitions[partition_id]}
        self.report_progress(min(len(done), self._wanted))
        refs = [w.wait_progress.remote(self._settled.get(i, 0), self.report_s) for i, w in enumerate(self._workers)]
        # The first answer is enough: a worker that has settled everything answers only when its time is up.
        answered, _ = ray.wait(refs, num_returns=1)
        for ref in answered:
            if (report := ray.get(ref)).settled == report.prompts:
                self._settled[refs.index(ref)] = report.settled
        return last_debug_time

    def _select_prompt_uids(self, partition_id, sampleable_keys, batch_size):
        # verl takes the first of a set: where there are more than a batch, that would be any.
        drawn = sorted(sampleable_keys, key=lambda uid: self._order.get(uid, 0))
        return super()._select_prompt_uids(partition_id, drawn, batch_size)

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
