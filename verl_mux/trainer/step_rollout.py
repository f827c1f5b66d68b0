"""A step's rollout whose samples the trainer launches, cuts off and lets go on one by one (over-sampling, segments, SJF, moves).

Runs in the trainer's driver; called by trainer/modes.py, and by trainer/replay_buffer.py where verl asks for the step's samples.
Touches the agent loop workers over Ray and prompts in verl's TransferQueue. What to do is decided by rollout/control.

    begin(step) -> run() until the step's prompt groups are complete -> their uids; every other group goes on later, or is dropped

One object a job. With the keys of `mux.rollout` that need it off, verl launches whole prompt groups and there is none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_mux.config.schema import RolloutConfig
from verl_mux.errors import Failure
from verl_mux.profiling.eventlog import events
from verl_mux.rollout.control.oversampling import LagLimit, Oversampler
from verl_mux.rollout.control.segment_loss import treat_batch
from verl_mux.rollout.control.segments import SegmentSteps
from verl_mux.rollout.instructions import Abort, Draw, Drop, Finish, Instruction, Launch, Report, Segment
from verl_mux.trainer.job_hosts import ActorWatch
from verl_mux.trainer.phases import Phases
from verl_mux.trainer.prompts import ALL_FAIL, FAILED_STEPS, TOO_MANY_FILTERED, Prompts, stamped
from verl_mux.trainer.replica_moves import ReplicaMoves

_FILE = "mux_rollout.json"
_REPORT_S = 0.5


class StepRollout:
    """trainer: verl's, with its replay buffer and agent loop manager. saved: of the checkpoint that the job resumes, see
    `load`."""

    def __init__(
        self, trainer: PPOTrainer, keys: RolloutConfig, prompts: Prompts, phases: Phases, watch: ActorWatch, moves: ReplicaMoves,
        saved: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._trainer, self._keys, self._prompts, self._phases, self._watch = trainer, keys, prompts, phases, watch
        self._manager, self._buffer, self._moves = trainer.agent_loop_manager, trainer.replay_buffer, moves
        self._samples = trainer.config.actor_rollout_ref.rollout.n
        limits, rate = keys.segment_limits(trainer.config.data.max_response_length), keys.oversample.rate
        lag = keys.lag_limit(trainer.config.trainer.v1.sampler.max_off_policy_threshold)
        self.machine: Oversampler | SegmentSteps
        if limits is None:
            self._longest, self.machine = None, Oversampler(self._samples, rate, keys.oversample.max_cuts, lag)
        else:
            self._longest, self.machine = limits.longest, SegmentSteps(limits, self._samples, rate, lag)
        self._saved = saved
        if saved is not None:
            self.machine.restore(saved["machine"])
        self._step = self._done = self._failed = self._wanted = 0  # failed: groups that were given up for it
        self._launched: set[tuple[str, int]] = set()  # samples of this step: one that failed and starts again is one
        self._began = 0.0
        self._finished: tuple[str, ...] | None = None
        self._waiting: dict[Any, Any] = {}  # Ray's reference -> worker
        self._rows: TensorDict | None = None  # prompt groups from a checkpoint, not launched yet
        self._calls: dict[str, dict[int, list]] = {}  # engine calls that they had made, by group and sample

    def begin(self, step: int, wanted: int) -> None:
        """Launch a step that trains `wanted` prompt groups."""
        self._step, self._wanted, self._finished, self._began = step, wanted, None, time.perf_counter()
        self._launched, self._done, self._failed = set(), 0, 0
        self._carry_out(self.machine.begin(wanted))

    def run(self) -> list[str]:
        """Until the step's groups are complete: their uids. What is cut off has left its engine by then."""
        while self._finished is None:
            for report in self._reports():
                if report.kind == "done":
                    self._done += (report.group, report.sample) in self._launched
                    if self.machine.completes(report) and self._buffer.is_filtered(report.group):
                        report = report._replace(kind="filtered")
                self._carry_out(self.machine.report(report))
            self._watch.check()
            if not self._done and self._failed >= FAILED_STEPS * self._wanted:
                raise Failure(ALL_FAIL.format(self._failed))
            self._phases.mux.progress(self._done, max(len(self._launched), 1))
            if self._finished is None:
                self._moves.consider(self._done, len(self._launched))
        groups = list(self._finished)
        if len(groups) < self._wanted:  # verl's data never end
            raise Failure(TOO_MANY_FILTERED)
        extra = {"total_requests": len(self._launched), "target_completion": self._wanted * self._samples,
                 "completed_count": self._done}  # fmt: skip
        self._phases.log.log(events.GENERATE_MONITORED, time.perf_counter() - self._began, extra=extra, step=self._step)
        self._take_off(groups, self._manager.forget)
        return groups

    def treat_older_tokens(self, batch: KVBatchMeta, metrics: dict) -> None:
        """Tokens that older weights wrote count in the loss as `mux.rollout.segments.treatment` says."""
        if not self._keys.cuts:
            return
        names = ["extra_fields", "response_mask", "old_log_probs"]
        names += ["rollout_log_probs"] if self._keys.needs_rollout_log_probs else []
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        segments = [[Segment(*it) for it in (extra or {}).get("mux_segments", [])] for extra in list(data["extra_fields"])]
        treated = treat_batch(
            self._keys.segments.treatment, segments, self._trainer.global_steps - 1, data["response_mask"],
            data["old_log_probs"], data.get("rollout_log_probs", None),
        )  # fmt: skip
        metrics.update({f"mux/rollout/{key}": value for key, value in treated.metrics.items()})
        if treated.fields:
            write = data.select("old_log_probs")
            for name, values in treated.fields.items():
                write[name] = values
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=write)

    def _reports(self) -> list[Report]:
        """The next reports of the first worker that has some."""
        idle = [worker for worker in self._manager.agent_loop_workers if worker not in self._waiting.values()]
        self._waiting |= {worker.reports.remote(_REPORT_S): worker for worker in idle}
        done, _ = ray.wait(list(self._waiting), num_returns=1)
        for reference in done:
            del self._waiting[reference]
        return [Report(*report) for reports in ray.get(done) for report in reports]

    def _carry_out(self, instructions: list[Instruction]) -> None:
        launches = [it for it in instructions if isinstance(it, Launch)]
        aborts = [it for it in instructions if isinstance(it, Abort)]
        if launches:
            self._go_on(launches)
        if aborts:
            self._manager.cut([(it.group, it.sample) for it in aborts])
        for it in instructions:
            if isinstance(it, Drop):
                self._failed += it.reason == "failed"
                self._take_off([it.group], self._manager.drop)
                self._buffer.clear_groups({it.group})
                self._prompts.order.forget({it.group})
            elif isinstance(it, Finish):
                self._finished = it.groups
            elif isinstance(it, Draw):
                self._begin_new(it.count)

    def _begin_new(self, count: int) -> None:
        if not (count := self._prompts.room(count)):
            return self._carry_out(self.machine.drawn([]))
        batch = self._prompts.next_batch(count)
        uids = list(batch["uid"])
        place = {uid: len(uids) - at for at, uid in enumerate(uids)}
        instructions = self.machine.drawn(uids)
        new = [it for it in instructions if isinstance(it, Launch) and it.group in place]
        rest = [it for it in instructions if not (isinstance(it, Launch) and it.group in place)]
        self._launched |= {(it.group, it.sample) for it in new}
        # Samples that go on reach the engine before the new ones; an abort of a new one needs a worker that knows it.
        self._carry_out([it for it in rest if isinstance(it, Launch)])
        fields = batch.select(*[key for key, value in batch.items() if not isinstance(value, NonTensorData)])
        self._put_prompts(uids, fields)
        self._manager.launch([self._completed(it, priority=place[it.group]) for it in new], batch)
        self._carry_out([it for it in rest if not isinstance(it, Launch)])

    def _go_on(self, launches: list[Launch]) -> None:
        """Samples that are on a worker already go on there; groups from a checkpoint go out with their rows."""
        self._launched |= {(it.group, it.sample) for it in launches}
        # Left-over groups go before new ones, whatever order those have among themselves.
        launches = [self._completed(it, priority=2 * len(launches)) for it in launches]
        fresh = list(dict.fromkeys(it.group for it in launches if not self._manager.knows(it.group)))
        if fresh:
            assert self._rows is not None
            out = [it for it in launches if it.group in fresh]
            calls, launched = {group: self._calls.pop(group, {}) for group in fresh}, {(it.group, it.sample) for it in out}
            # Their other samples ended before the checkpoint: the agent loops of these run on what is known.
            replays = [
                Launch(group, sample, kept=sum(len(call["token_ids"]) for call in made), step=self._step)
                for group in fresh
                for sample, made in calls[group].items()
                if (group, sample) not in launched
            ]
            rows = self._rows[[at for at, uid in enumerate(list(self._rows["uid"])) if uid in fresh]]
            self._manager.launch([*out, *replays], rows, calls)
        if known := [it for it in launches if it.group not in fresh]:
            self._manager.launch(known)

    def _completed(self, it: Launch, priority: int) -> Launch:
        return replace(it, step=self._step, longest=self._longest, priority=priority)

    def _take_off(self, groups: Iterable[str], how: Callable[[list[str]], None]) -> None:
        """Trained or given up; a group that came ready from a checkpoint, or too old, was never on a worker."""
        how([group for group in groups if self._manager.knows(group)])
        for group in groups:
            self._calls.pop(group, None)

    def _put_prompts(self, uids: list[str], fields: TensorDict | None = None) -> None:
        """As verl's `_submit_batch_to_rollout` registers prompts, which also has all their samples generate."""
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self._trainer.global_steps} for _ in uids]
        more = {} if fields is None else {"fields": fields}
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags, **more)

    def save(self, folder: Path) -> None:
        """Into a checkpoint's folder: the machine, and the engine calls of the groups that wait."""
        groups = self._buffer.waiting_groups()
        calls = {group: self._calls[group] for group in groups if group in self._calls} | self._manager.saved_calls(groups)
        (folder / _FILE).write_text(json.dumps({"machine": self.machine.to_dict(), "calls": calls}))

    def restore_waiting(self, partition_id: str) -> int:
        """In place of verl's reissue: a checkpoint's prompt groups wait for the first lease and go first under it. How many."""
        items = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        uids = [key for key, tag in items.items() if tag.get("is_prompt", False)]
        if self._saved is None or not uids:
            return 0
        # Trajectories of samples that had ended stay where the checkpoint put them.
        self._rows = stamped(_as_drawn(tq.kv_batch_get(keys=uids, partition_id=partition_id)), self._trainer.global_steps)
        self._put_prompts(uids)
        self._prompts.remember_order(uids)
        self._calls = {group: {int(s): c for s, c in calls.items()} for group, calls in self._saved["calls"].items()}
        return len(uids)


def load(folder: Path) -> dict[str, Any] | None:
    """What `save` wrote there; None where the checkpoint has no such file."""
    return json.loads((folder / _FILE).read_text()) if (folder / _FILE).exists() else None


def may_train_on(tag: dict[str, Any], version: int, keys: RolloutConfig, lag: LagLimit | None) -> bool:
    """Was a sample with this tag generated with weights that a step may train on whose own are of `version`?"""
    oldest, newest = tag.get("min_global_steps"), tag.get("max_global_steps")
    if not keys.cuts or oldest is None or newest is None:
        return (oldest, newest) == (version, version)
    return newest <= version and (lag is None or version - oldest <= lag.most)


def _as_drawn(prompts: TensorDict) -> TensorDict:
    """TransferQueue gives a column of tensors back as a nested one, of which no rows can be taken; a data loader, a plain one."""
    for name, column in prompts.items():
        if isinstance(column, torch.Tensor) and column.is_nested:
            prompts[name] = torch.stack(column.unbind())
    return prompts
