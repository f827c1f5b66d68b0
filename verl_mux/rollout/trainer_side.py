"""The trainer's part of rollout control: what our trainer modes do differently where `mux.rollout` asks for it.

A mixin over verl's PPOTrainer, before it in the order of bases. With over-sampling and segments off, only the order in which
prompts are handed out differs from verl's.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils.fs import local_mkdir_safe

from verl_mux.rollout.config import RolloutConfig
from verl_mux.rollout.control import RolloutControl
from verl_mux.rollout.launch_order import LaunchOrder, prompt_of
from verl_mux.rollout.oversampling import Oversampler
from verl_mux.rollout.predictor import make_predictor
from verl_mux.rollout.segment_batch import treat_batch
from verl_mux.rollout.segment_steps import SegmentSteps
from verl_mux.rollout.segments import Segment
from verl_mux.rollout.tail_migration import TailMigration, units

_FILE = "mux_rollout.json"


class ControlledRollout:
    """Expects `rollout_config`, `phases` and `replay_buffer` of the trainer it is mixed into."""

    rollout_config: RolloutConfig
    control: RolloutControl | None = None

    def _start_control(self) -> None:
        """Once the agent loop manager is there."""
        self.launch_order = LaunchOrder(
            self.rollout_config.order(self.trainer_mode), make_predictor(self.rollout_config.dispatch.predictor)
        )
        if not self.rollout_config.controlled:
            return
        limits = self.rollout_config.segment_limits(self.config.data.max_response_length)
        self.control = RolloutControl(
            self._machine(limits),
            self.agent_loop_manager,
            draw=self._draw_prompts,
            submit=super()._submit_batch_to_rollout,
            clear=lambda uids: self.replay_buffer.clear_groups(uids),
            on_progress=self._report_samples,
            log=self.phases.log,
            restart=limits is None and self.rollout_config.oversample.tokens == "restart",
            longest=None if limits is None else limits.longest,
            migration=self._migration(),
        )
        self.replay_buffer.control = self.control

    def _machine(self, limits) -> Oversampler | SegmentSteps:
        n, it = self.config.actor_rollout_ref.rollout.n, self.rollout_config.oversample
        saved = (getattr(self, "_saved_control", None) or {}).get("machine")
        if limits is None:
            policy = self.rollout_config.oversampling_policy()
            return Oversampler(policy, n) if saved is None else Oversampler.from_dict(policy, n, saved)
        if saved is None:
            return SegmentSteps(limits, n, it.rate, it.max_failures)
        return SegmentSteps.from_dict(limits, n, saved, it.rate, it.max_failures)

    def _migration(self) -> TailMigration | None:
        policy = self.rollout_config.migration_policy()
        if policy is None:
            return None
        manager, rollout = self.rollout_server_manager, self.config.actor_rollout_ref.rollout
        return TailMigration(
            policy,
            units(self.settings.rollout_nodes, manager.server_addresses),
            workers=lambda: self.agent_loop_manager.agent_loop_workers,
            balancer=manager.global_load_balancer,
            handles=dict(zip(manager.server_addresses, manager.server_handles, strict=True)),
            contended=lambda: self.phases.mux.contended("rollout"),
            vacate=self._vacate,
            log=self.phases.log,
            longest=self.config.data.max_response_length,
            max_requests=rollout.max_num_seqs,
            max_tokens=rollout.max_num_seqs * (self.config.data.max_prompt_length + self.config.data.max_response_length),
        )

    # ---------------------------------------------------------------- launching

    def fit(self, agent_loop_manager) -> None:
        self.agent_loop_manager = agent_loop_manager
        self._start_control()
        super().fit(agent_loop_manager)

    def prepare_step(self) -> dict:
        if self.control is None:
            return super().prepare_step()
        self.control.begin(self.global_steps, self.config.data.train_batch_size)
        return {}

    def _submit_batch_to_rollout(self, batch) -> int:
        return super()._submit_batch_to_rollout(self._ordered(batch))

    def _draw_prompts(self, count: int):
        return self._ordered(self._next_train_batch(count))

    def _ordered(self, batch):
        """The rows in launching order; gradients keep the order in which they were drawn."""
        uids = list(batch["uid"])
        if hasattr(self.replay_buffer, "submitted"):  # a user's own sampler has no such thing
            self.replay_buffer.submitted(uids)
        raw, index = (list(batch[key]) if key in batch else [None] * len(uids) for key in ("raw_prompt", "index"))
        prompts = [prompt_of({"raw_prompt": r, "index": i}) for r, i in zip(raw, index, strict=True)]
        place = self.launch_order.place(uids, prompts)
        return batch if (place == np.arange(len(place))).all() else batch[place.tolist()]

    def _observe_lengths(self, batch: KVBatchMeta) -> None:
        lengths: dict[str, list[int]] = defaultdict(list)
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if not tag.get("is_padding", False):
                lengths[key.split("_")[0]].append(int(tag["response_len"]))
        epoch = (self.global_steps - 1) // max(1, self.steps_per_epoch)
        self.launch_order.observe(lengths, epoch)

    def _report_samples(self, done: int, total: int) -> None:
        self.phases.mux.progress(done, total)

    # ---------------------------------------------------------------- training

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        self._observe_lengths(batch)
        if self.control is not None:
            figures = self.control.machine.metrics.as_dict() | (self.control.migration.metrics if self.control.migration else {})
            metrics.update({f"mux/rollout/{key}": value for key, value in figures.items()})
        if self.rollout_config.keeps_tokens:
            self._treat_segments(batch, metrics)
        return batch

    def _treat_segments(self, batch: KVBatchMeta, metrics: dict) -> None:
        fields = ["extra_fields", "response_mask", "old_log_probs"]
        fields += ["rollout_log_probs"] if self.rollout_config.needs_rollout_log_probs else []
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        segments = [_segments(extra) for extra in list(data["extra_fields"])]
        treated = treat_batch(
            self.rollout_config.segments.treatment, segments, self.global_steps - 1, data["response_mask"],
            data["old_log_probs"], data.get("rollout_log_probs", None),
        )  # fmt: skip
        metrics.update({f"mux/rollout/{key}": value for key, value in treated.metrics.items()})
        if treated.fields:
            names = ("old_log_probs", "response_mask", "loss_mask")
            write = data.select("old_log_probs")
            for name in names:
                if name in treated.fields:
                    write[name] = treated.fields[name]
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=write)

    def _check_versions(self, tag: dict[str, Any], expected: int) -> bool:
        """Was a sample generated with weights it may be trained on at this step?"""
        versions = (tag.get("min_global_steps"), tag.get("max_global_steps"))
        if self.rollout_config.keeps_tokens:
            return None not in versions and versions[1] <= expected
        return versions == (expected, expected)

    # ---------------------------------------------------------------- checkpoint and resume

    def _save_checkpoint(self) -> None:
        # Before verl writes which checkpoint is the latest.
        if self.control is not None:
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
            local_mkdir_safe(str(folder))
            (folder / _FILE).write_text(json.dumps(self.control.to_dict(self.replay_buffer.waiting_groups())))
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        path = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / _FILE
        if self.config.trainer.resume_mode == "resume_path":
            path = Path(self.config.trainer.resume_from_path) / _FILE
        if self.global_steps and path.exists():
            self._saved_control = json.loads(path.read_text())

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        """Prompt groups of the checkpoint wait for the first step's lease, and go first in it."""
        if self.control is None:
            return super()._reissue_inflight_prompts(partition_id)
        saved = getattr(self, "_saved_control", None)
        items = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        uids = [key for key, tag in items.items() if tag.get("is_prompt", False)]
        if saved is None or not uids:
            return 0
        # Trajectories of samples that had ended stay where the checkpoint put them.
        rows = tq.kv_batch_get(keys=uids, partition_id=partition_id)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.global_steps} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id=partition_id, tags=tags)
        self.replay_buffer.submitted(uids)
        calls = {group: {int(s): c for s, c in its.items()} for group, its in saved["calls"].items()}
        self.control.restore(rows, calls)
        return len(uids)


def _segments(extra: dict[str, Any]) -> list[Segment]:
    return [Segment(*segment) for segment in (extra or {}).get("mux_segments", [])]
