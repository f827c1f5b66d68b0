"""What a trainer of ours does for its rollout where `mux.rollout` asks for it: order, control, treatment, checkpoint.

`PPOTrainerMux` overrides verl's methods and calls these; each says where in a step it is called. With over-sampling, segments
and migration off, only the order in which prompts are handed out differs from verl's.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.fs import local_mkdir_safe

from verl_mux.config.rollout_keys import RolloutConfig
from verl_mux.coordinator.bus.client import Lease, LocalMux
from verl_mux.errors import UserError
from verl_mux.rollout.control.growth import Growth
from verl_mux.rollout.control.lag_limit import LagLimit
from verl_mux.rollout.control.launch_order import LaunchOrder, prompts_of
from verl_mux.rollout.control.oversampling import Oversampler
from verl_mux.rollout.control.rollout_control import RolloutControl
from verl_mux.rollout.control.segment_batch import treat_batch
from verl_mux.rollout.control.segment_steps import SegmentSteps
from verl_mux.rollout.control.segments import SegmentLimits
from verl_mux.rollout.control.tail_migration import TailMigration
from verl_mux.rollout.control.units import Room, Unit, units
from verl_mux.rollout.lengths.predictor import make_predictor
from verl_mux.rollout.messages import Launch, Segment
from verl_mux.trainer.phases import Phases
from verl_mux.trainer.tail_door import TailDoor, stamped
from verl_mux.worker_settings import WorkerSettings

_FILE = "mux_rollout.json"


class Trainer(Protocol):
    """What the rollout side needs of its trainer: verl's attributes, and what our modes add (settings, phases, ...)."""

    config: DictConfig
    trainer_mode: str
    global_steps: int
    steps_per_epoch: int
    total_training_steps: int
    train_dataloader: Any
    replay_buffer: Any  # MuxReplayBuffer, or a sampler of the user's own where nothing is controlled
    agent_loop_manager: Any  # MuxAgentLoopManager
    rollout_server_manager: Any  # MuxLLMServerManager
    settings: WorkerSettings
    phases: Phases

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        """So many new prompts, in launching order."""

    def draw_from_data(self, count: int) -> TensorDict:
        """So many new prompts, as the data loader hands them out."""

    def tell_progress(self, done: int, total: int) -> None:
        """Samples of the step; raises where an actor that the rollout needs is no more."""

    def vacate(self, unit: Unit) -> None:
        """Give nodes back whose engines are idle for the rest of the rollout."""

    def join(self, unit: Unit, lease: Lease) -> None:
        """Wake engines beside those that generate, with the same weights."""

    def part(self, unit: Unit) -> None:
        """Put engines to sleep before the others."""

    def connect_to_grow(self, unit: Unit) -> LocalMux:
        """A client that asks for its nodes whenever no job uses them."""


class RolloutSide:
    """One object a trainer. `control`: what launches, cuts off and lets go on; None where verl's own way does."""

    def __init__(self, trainer: Trainer, config: RolloutConfig) -> None:
        self._trainer, self._config = trainer, config
        self._order = LaunchOrder(config.launch_order, make_predictor(config.dispatch.predictor))
        self._saved: dict[str, Any] | None = None
        self.control: RolloutControl | None = None
        self._growth: Growth | None = None
        self._tail = self._make_tail() if config.defers else None

    def _make_tail(self) -> TailDoor:
        trainer = self._trainer
        return TailDoor(
            self._config.defer,
            trainer.config.data.train_batch_size,
            trainer.config.actor_rollout_ref.rollout.n,
            make_predictor(self._config.dispatch.predictor),
            draw=trainer.draw_from_data,
            loader=lambda: trainer.train_dataloader,
            steps_ahead=self._steps_ahead,
        )

    def _steps_ahead(self) -> int:
        """Steps left in this epoch and in the training, this one included."""
        step, an_epoch = max(self._trainer.global_steps, 1), max(1, self._trainer.steps_per_epoch)
        return max(1, min(an_epoch - (step - 1) % an_epoch, self._trainer.total_training_steps - step + 1))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """All steps; the agent loop manager is there by then."""
        self._start()
        try:
            yield
        except BaseException as error:
            self._end_growth(f"its job ended with {type(error).__name__}")
            raise
        self._end_growth(None)

    def _start(self) -> None:
        if not self._config.controlled:
            return
        trainer, limits = self._trainer, self._config.segment_limits(self._trainer.config.data.max_response_length)
        self._growth = self._make_growth()
        self.control = RolloutControl(
            self._machine(limits),
            trainer.agent_loop_manager,
            draw=trainer._next_train_batch,
            submit=self._register_and_launch,
            clear=self._give_up,
            on_progress=trainer.tell_progress,
            log=trainer.phases.log,
            restart=limits is None and self._config.oversample.tokens == "restart",
            longest=None if limits is None else limits.longest,
            samples=trainer.config.actor_rollout_ref.rollout.n,
            on_done=self._observe_early,
            migration=self._migration(),
            growth=self._growth,
        )
        trainer.replay_buffer.control = self.control

    def _machine(self, limits: SegmentLimits | None) -> Oversampler | SegmentSteps:
        n, it = self._trainer.config.actor_rollout_ref.rollout.n, self._config.oversample
        saved = (self._saved or {}).get("machine")
        lag = self._lag_limit()
        if limits is None:
            return Oversampler(it, n, lag) if saved is None else Oversampler.from_dict(it, n, saved, lag)
        if saved is None:
            return SegmentSteps(limits, n, it.rate, it.max_failures, lag)
        return SegmentSteps.from_dict(limits, n, saved, it.rate, it.max_failures, lag)

    def _lag_limit(self) -> LagLimit | None:
        return self._config.lag_limit(self._trainer.config.trainer.v1.sampler.max_off_policy_threshold)

    def _migration(self) -> TailMigration | None:
        if not self._config.migration.enable:
            return None
        trainer = self._trainer
        return TailMigration(
            self._config.migration,
            self._units("mux.rollout.migration.enable=True"),
            workers=lambda: trainer.agent_loop_manager.agent_loop_workers,
            balancer=trainer.rollout_server_manager.global_load_balancer,
            handles=self._handles(),
            gangs=lambda: trainer.phases.mux.gangs("rollout"),
            vacate=trainer.vacate,
            log=trainer.phases.log,
            room=self._room(),
        )

    def _make_growth(self) -> Growth | None:
        if self._config.growth.own is None:
            return None
        trainer, own = self._trainer, set(self._config.growth.own)
        asked = f"mux.rollout.growth.own={list(self._config.growth.own)}"
        found = self._units(asked)
        mine = [unit for unit in found if own.issuperset(unit.nodes)]
        others = [unit for unit in found if own.isdisjoint(unit.nodes)]
        if parted := next((unit for unit in found if unit not in mine and unit not in others), None):
            runs_on = f"replica {parted.replicas[0]} runs on {', '.join(parted.nodes)}"
            raise UserError(f"{asked} is not possible: {runs_on}; allowed: all nodes of a replica, or none")
        muxes, engines = [trainer.connect_to_grow(unit) for unit in others], trainer.rollout_server_manager.processes()
        for mux in muxes:  # their nodes too are given on only when the job's engines are gone
            mux.members(engines)
        return Growth(
            self._config.growth,
            mine,
            others,
            muxes,
            workers=lambda: trainer.agent_loop_manager.agent_loop_workers,
            balancer=trainer.rollout_server_manager.global_load_balancer,
            handles=self._handles(),
            join=trainer.join,
            part=trainer.part,
            device=trainer.phases.device,
            log=trainer.phases.log,
            room=self._room(),
        )

    def _units(self, asked: str) -> list[Unit]:
        manager = self._trainer.rollout_server_manager
        return units([replica.nodes for replica in manager.get_replicas()], manager.server_addresses, asked)

    def _handles(self) -> dict[str, Any]:
        manager = self._trainer.rollout_server_manager
        return dict(zip(manager.server_addresses, manager.server_handles, strict=True))

    def _room(self) -> Room:
        data, at_once = self._trainer.config.data, self._trainer.config.actor_rollout_ref.rollout.max_num_seqs
        return Room(data.max_response_length, at_once, at_once * (data.max_prompt_length + data.max_response_length))

    # ---------------------------------------------------------------- nodes

    @property
    def own_nodes(self) -> list[str] | None:
        """Those that every rollout waits for; None: all."""
        return self._config.growth.own

    @property
    def lent_replicas(self) -> list[int]:
        """Those on other nodes."""
        return self._growth.replicas if self._growth is not None else []

    def nodes_are_held(self, step: int, grows: bool) -> None:
        """A rollout begins on its own nodes; `grows`: it may use others."""
        if self._growth is not None and grows:
            self._growth.ask(step)

    def engines_are_back(self, grows: bool) -> None:
        """All engines of its nodes are awake and hold the step's weights; before anything is launched."""
        if self._growth is not None and grows:
            self._growth.open()
        if self.control is not None and self.control.migration is not None:
            self.control.migration.restore()

    def leave_lent(self) -> None:
        """No engine of other nodes is used until they are granted again. Whoever calls has the device."""
        if self._growth is not None:
            self._growth.leave()

    def is_over(self) -> None:
        """The last response is there: other nodes go back."""
        if self._growth is not None:
            self._growth.close()

    def _end_growth(self, failed: str | None) -> None:
        if self._growth is not None:
            self._growth.end(failed)

    # ---------------------------------------------------------------- launching

    def next_batch(self, count: int | None) -> TensorDict:
        """Prompts for this step, in launching order; `count` None: as many as it trains."""
        count = self._trainer.config.data.train_batch_size if count is None else count
        if self._tail is None:
            return self._ordered(self._trainer.draw_from_data(count))
        return stamped(self._ordered(self._tail.next_batch(count)), self._trainer.global_steps)

    def _ordered(self, batch: TensorDict) -> TensorDict:
        """Prompts just drawn, in launching order; gradients keep the order in which they were drawn."""
        uids = list(batch["uid"])
        self._remember_order(uids)
        place = self._order.place(uids, prompts_of(batch))
        return batch if (place == np.arange(len(place))).all() else batch[place.tolist()]

    def _remember_order(self, uids: list[str]) -> None:
        if hasattr(self._trainer.replay_buffer, "submitted"):  # a user's own sampler has no such thing
            self._trainer.replay_buffer.submitted(uids)

    def _give_up(self, uids: set[str]) -> None:
        """Prompt groups that are dropped."""
        self._trainer.replay_buffer.clear_groups(uids)
        self._order.forget(uids)

    def _register_and_launch(self, batch: TensorDict, launches: list[Launch]) -> None:
        """verl's `_submit_batch_to_rollout`, which registers prompts and has all their samples generate, for chosen samples."""
        fields = batch.select(*[key for key, value in batch.items() if not isinstance(value, NonTensorData)])
        self._put_prompts(list(batch["uid"]), fields)
        self._trainer.agent_loop_manager.launch(launches, batch)

    def _put_prompts(self, uids: list[str], fields: TensorDict | None = None) -> None:
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self._trainer.global_steps} for _ in uids]
        more = {} if fields is None else {"fields": fields}
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags, **more)

    # ---------------------------------------------------------------- training

    def was_generated_by(self, tag: dict[str, Any], version: int) -> bool:
        """Was a sample generated with weights that a step may train on whose weights are of `version`?"""
        oldest, newest = tag.get("min_global_steps"), tag.get("max_global_steps")
        if self._config.keeps_tokens:
            lag = self._lag_limit()
            return (
                oldest is not None and newest is not None and newest <= version and (lag is None or version - oldest <= lag.most)
            )
        return (oldest, newest) == (version, version)

    def after_old_log_probs(self, batch: KVBatchMeta, metrics: dict) -> None:
        """Lengths are learnt, figures told, and tokens that older weights wrote treated as `segments.treatment` says."""
        self._observe_lengths(batch)
        for part in (self.control, self._tail):
            if part is not None:
                metrics.update({f"mux/rollout/{key}": value for key, value in part.figures().items()})
        if self._config.keeps_tokens:
            self._treat_older_tokens(batch, metrics)

    def _observe_early(self, group: str, tokens: int) -> None:
        """A sample of a step under way has ended."""
        self._order.observe_early(group, tokens, self._epoch())

    def _epoch(self) -> int:
        return (self._trainer.global_steps - 1) // max(1, self._trainer.steps_per_epoch)

    def _observe_lengths(self, batch: KVBatchMeta) -> None:
        lengths: dict[str, list[int]] = defaultdict(list)
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if not tag.get("is_padding", False):
                lengths[key.split("_")[0]].append(int(tag["response_len"]))
        self._order.observe(lengths, self._epoch())
        if self._tail is not None:
            self._tail.trained(lengths, self._epoch())

    def _treat_older_tokens(self, batch: KVBatchMeta, metrics: dict) -> None:
        names = ["extra_fields", "response_mask", "old_log_probs"]
        names += ["rollout_log_probs"] if self._config.needs_rollout_log_probs else []
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        segments = [_segments(extra) for extra in list(data["extra_fields"])]
        treated = treat_batch(
            self._config.segments.treatment, segments, self._trainer.global_steps - 1, data["response_mask"],
            data["old_log_probs"], data.get("rollout_log_probs", None),
        )  # fmt: skip
        metrics.update({f"mux/rollout/{key}": value for key, value in treated.metrics.items()})
        if treated.fields:
            write = data.select("old_log_probs")
            for name, values in treated.fields.items():
                write[name] = values
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=write)

    # ---------------------------------------------------------------- checkpoint and resume

    def save(self) -> None:
        """Before verl writes which checkpoint is the latest."""
        folder = self._folder()
        if self.control is not None or self._tail is not None:
            local_mkdir_safe(str(folder))
        if self._tail is not None:
            self._tail.save(folder)
        if self.control is not None:
            (folder / _FILE).write_text(json.dumps(self.control.to_dict(self._trainer.replay_buffer.waiting_groups())))

    def load(self) -> None:
        """Once verl has loaded its checkpoint; before `start`."""
        trainer = self._trainer.config.trainer
        folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else self._folder()
        if self._trainer.global_steps and self._tail is not None:
            self._tail.load(folder)
        if self._trainer.global_steps and (folder / _FILE).exists():
            self._saved = json.loads((folder / _FILE).read_text())

    def _folder(self) -> Path:
        return Path(self._trainer.config.trainer.default_local_dir) / f"global_step_{self._trainer.global_steps}"

    def restore_waiting(self, partition_id: str) -> int:
        """Instead of verl's reissue: a checkpoint's prompt groups wait for the first lease and go first under it. How many."""
        items = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        uids = [key for key, tag in items.items() if tag.get("is_prompt", False)]
        if self.control is None or self._saved is None or not uids:
            return 0
        # Trajectories of samples that had ended stay where the checkpoint put them.
        rows = stamped(_as_drawn(tq.kv_batch_get(keys=uids, partition_id=partition_id)), self._trainer.global_steps)
        self._put_prompts(uids)
        self._remember_order(uids)
        calls = {group: {int(s): c for s, c in its.items()} for group, its in self._saved["calls"].items()}
        self.control.restore(rows, calls)
        return len(uids)


def _as_drawn(prompts: TensorDict) -> TensorDict:
    """TransferQueue gives a column of tensors back as a nested one, of which no rows can be taken; a data loader, a plain one."""
    for name, column in prompts.items():
        if isinstance(column, torch.Tensor) and column.is_nested:
            prompts[name] = torch.stack(column.unbind())
    return prompts


def _segments(extra: dict[str, Any]) -> list[Segment]:
    return [Segment(*segment) for segment in (extra or {}).get("mux_segments", [])]
