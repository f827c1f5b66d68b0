"""verl's trainer modes `mux_separate` and `mux_colocate`: strictly on-policy PPO/GRPO whose phases take turns with other jobs'.

One step k, both modes:

    prepare_step   rollout lease -> weights mapped -> SYNC from the trainers' host copies -> KV cache mapped -> prompts out
    on_sample_end  engines asleep -> rollout lease back -> train lease -> trainer states from host memory
    (verl)         old log-probs, advantages, update, checkpoint
    on_step_end    trainer states to host memory -> train lease back

mux_separate has a rollout pool and a training pool; in mux_colocate both phases run on the training pool's GPUs.
Imported by verl right after its own trainers (see plugin.py); registers with `register_trainer`.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Iterator
from typing import Any

import ray
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.utils.device import get_device_name

from verl_mux.config.preflight import connect_job
from verl_mux.config.schema import check
from verl_mux.profiling import live
from verl_mux.rollout.tail_migration import Unit
from verl_mux.rollout.trainer_side import ControlledRollout
from verl_mux.sync.manager import MuxCheckpointManager
from verl_mux.trainer import (
    job_config,
    stock_profile,  # noqa: F401  (registers at import)
)
from verl_mux.trainer.phases import Phases
from verl_mux.trainer.replay_buffer import MuxReplayBuffer
from verl_mux.trainer.workers import MuxActorWorker, MuxTrainingWorker


class OffPolicyError(RuntimeError):
    """A sample was generated with other weights than the trainer's of this step."""


class PPOTrainerMux(ControlledRollout, PPOTrainer):
    """What both modes share. See the module's docstring for a step's life."""

    _enable_hybrid_replicas = False
    _colocated = False

    def __init__(self, config: DictConfig) -> None:
        mux = check(config)
        self.rollout_config = mux.rollout
        self._cpu = get_device_name() == "cpu"
        job_config.complete(config, mux, self._cpu)
        self._connect(config, mux)
        with self._leaving_on_failure():
            super().__init__(config)

    def _connect(self, config: DictConfig, mux) -> None:
        client = connect_job(config, mux)
        # The coordinator's answer: pools spelt out, and where it placed a job that left its nodes to it.
        mux.nodes.rollout, mux.nodes.train = list(client.nodes["rollout"]), list(client.nodes["train"])
        nodes = {"rollout": mux.nodes.rollout, "train": mux.nodes.train}
        cpus = {side: client.cpus(names[0]) or [] for side, names in nodes.items()} if self._cpu else {"rollout": [], "train": []}
        self.settings = job_config.hand_to_workers(config, mux, cpus["rollout"], cpus["train"])
        self.phases = Phases(client, _open_log(self.settings))
        self._nodes = {side: ",".join(names) for side, names in nodes.items()}
        self._rollout_began = self._last_sample = 0.0

    # ---------------------------------------------------------------- set-up

    def init(self) -> None:
        """verl's init; leases and event log do not outlive a failure."""
        with self._leaving_on_failure():
            super().init()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(MuxActorWorker)
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = ray.remote(MuxTrainingWorker)

    def _build_replay_buffer(self):
        sampler = self.config.trainer.v1.sampler
        custom = sampler.get("custom_sampler", None)
        if custom is not None and custom.get("path") and custom.get("name"):
            return super()._build_replay_buffer()
        buffer = MuxReplayBuffer(
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.get(self.trainer_mode, {}),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
        )
        buffer.workers = lambda: self.agent_loop_manager.agent_loop_workers
        buffer.on_progress = self._report_progress
        return buffer

    @property
    def actor_rollout_wg(self):
        """verl's actor worker group."""
        return self._actor_rollout_wg

    @actor_rollout_wg.setter
    def actor_rollout_wg(self, group) -> None:
        # verl sets it right before `init_model`, the first time the trainer touches its device: worker processes have started
        # and imported by then, so the init lease is held for the seconds that map memory and no longer.
        self.phases.begin("init", step=0)
        self._actor_rollout_wg = group

    def _setup(self) -> None:
        # Imports SGLang: only where one of our modes runs.
        from verl_mux.rollout.replica import MuxLLMServerManager

        super()._setup()
        self._sleep_trainer()
        self.phases.end()
        pool = self.resource_pool_manager.get_resource_pool(Role.Actor) if self._colocated else None
        self.rollout_server_manager = MuxLLMServerManager.create(
            config=self.config,
            acquire=lambda: self.phases.begin("init", step=0),
            release=lambda _lease: self.phases.end(),
            balancer=self.llm_server_manager.global_load_balancer,
            colocate_with=pool,
        )
        self.rollout_sync = MuxCheckpointManager(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=self.rollout_server_manager.get_replicas(),
        )
        self.phases.mux.members(self._processes())

    def get_llm_client(self):
        from verl_mux.rollout.flight_client import MuxServerClient

        return self.rollout_server_manager.get_client(client_cls=MuxServerClient)

    def _rollout_server_managers(self) -> list:
        manager = getattr(self, "rollout_server_manager", None)
        return [*super()._rollout_server_managers(), *([manager] if manager else [])]

    def _get_n_gpus_for_throughput(self) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        return self.resource_pool_manager.get_n_gpus() + (0 if self._colocated else rollout.n_gpus_per_node * rollout.nnodes)

    # ---------------------------------------------------------------- a step

    def fit(self, agent_loop_manager) -> None:
        """verl's fit; leases go back on every way out, after an exception as soon as the processes are gone."""
        with self._leaving_on_failure():
            super().fit(agent_loop_manager)
        self.close()

    def on_step_begin(self) -> None:
        self.phases.log.step = self.global_steps
        self._step_began = time.perf_counter()

    def prepare_step(self) -> dict:
        self._begin_rollout(version=self.global_steps - 1)
        return super().prepare_step()

    def on_sample_end(self) -> None:
        ready = time.perf_counter()
        if self.curr_step_profile:
            self._stop_rollout_profiling()
        self._end_rollout()
        self.phases.log.log("sample_ready", time.perf_counter() - ready, step=self.global_steps)
        self.phases.begin("train", self.global_steps)
        self._wake_trainer()

    def _balance_batch(self, batch: KVBatchMeta, metrics, **kwargs) -> KVBatchMeta:
        self._check_on_policy(batch)
        return super()._balance_batch(batch, metrics, **kwargs)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.phases.part("old_log_prob", self.global_steps):
            return super()._compute_old_log_prob(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.phases.part("update_actor", self.global_steps):
            return super()._update_actor(batch, metrics)

    def _save_checkpoint(self) -> None:
        with self.phases.part("save_checkpoint", self.global_steps):
            super()._save_checkpoint()

    def on_step_end(self) -> None:
        with marked_timer("mux_sleep", self.timing_raw):
            self._sleep_trainer()
        self.phases.end()

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        seconds = self.phases.take_seconds()
        metrics.update({f"mux/seconds/{name}": value for name, value in seconds.items()})
        extra = {"reward": float(metrics.get("critic/score/mean", 0.0)), "seconds": seconds,
                 "loss": float(metrics.get("actor/pg_loss", 0.0)), "grad_norm": float(metrics.get("actor/grad_norm", 0.0)),
                 "response_length": float(metrics.get("response_length/mean", 0.0)),
                 "tokens": int(metrics.get("perf/total_num_tokens", 0))}  # fmt: skip
        self.phases.log.log("step", time.perf_counter() - self._step_began, extra=extra, step=global_steps)
        metrics.update(live.metrics_of_step(self.phases.log, global_steps))
        self.phases.mux.report_step(global_steps, {k: v for k, v in extra.items() if isinstance(v, (int, float))})

    def on_validate_begin(self) -> None:
        # A validation follows an update (or comes before the first), so it runs on the newest weights, in a lease of its own.
        self._begin_rollout(version=self.global_steps)

    def on_validate_end(self) -> None:
        self._end_rollout()

    # ---------------------------------------------------------------- phases

    def _begin_rollout(self, version: int) -> None:
        """Rollout lease, weights of `version` on every rollout worker, KV cache mapped.

        Version k is the trainer's weights after step k.
        """
        step = self.global_steps
        self.phases.begin("rollout", max(step, 1))
        self._move_rollout("wake", ["weights"])
        with self.phases.part("sync", step, version=version) as extra:
            extra.update(self.rollout_sync.update_weights(version))
            extra["bytes"] = extra.get("mux/sync/bytes")
        self._pending_sync_metrics = {k: v for k, v in extra.items() if k.startswith("mux/")}
        self._move_rollout("wake", ["kv_cache"])
        if self.control is not None and self.control.migration is not None:
            self.control.migration.restore()
        self.phases.mux.note("generate")
        self._rollout_began = time.perf_counter()

    def _end_rollout(self) -> None:
        generated = time.perf_counter() - self._rollout_began
        self.phases.log.log("generate", generated, step=self.global_steps)
        self.phases._add("generate", generated)
        self._move_rollout("sleep", None)
        self.phases.end()

    def _move_rollout(self, verb: str, tags: list[str] | None) -> None:
        figures = _sum_tags(self.rollout_sync.move_replicas(verb, tags))
        self.phases.moved(verb, "rollout", self._nodes["rollout"], self.global_steps, figures, log=False)

    def _vacate(self, unit: Unit) -> None:
        """These nodes' engines are idle for the rest of the rollout: others may have the nodes."""
        self.rollout_sync.move_replicas("sleep", None, unit.replicas)
        self.phases.shrink(list(unit.nodes))

    def _sleep_trainer(self) -> None:
        self._move_trainer("sleep")

    def _wake_trainer(self) -> None:
        self._move_trainer("wake")

    def _move_trainer(self, verb: str) -> None:
        for group in self._train_groups():
            ranks = getattr(group, f"mux_{verb}")()
            self.phases.moved(verb, "train", self._nodes["train"], self.global_steps, _sum_tags(ranks))

    def _train_groups(self) -> list:
        groups = [self.actor_rollout_wg, getattr(self, "critic_wg", None), getattr(self, "ref_policy_wg", None)]
        return list({id(group): group for group in groups if group is not None}.values())

    def _check_on_policy(self, batch: KVBatchMeta) -> None:
        """Every sample of step k was generated, from first to last token, with the weights after step k-1."""
        expected = self.global_steps - 1
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if not tag.get("is_padding", False) and not self._check_versions(tag, expected):
                versions = (tag.get("min_global_steps"), tag.get("max_global_steps"))
                raise OffPolicyError(
                    f"step {self.global_steps} trains on weights of version {expected}; sample {key} has {versions}"
                )

    def _report_progress(self, samples: int, _settled: int) -> None:
        total = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        self.phases.mux.progress(samples % total or total, total)

    def _processes(self) -> list[tuple[str, int, float]]:
        """(host, pid, creation time) of all processes of this job that hold device memory on this host."""
        host = socket.gethostname()
        found = [p for group in self._train_groups() for ranks in group.mux_processes() for p in ranks]
        return [(host, pid, created) for pid, created in [*found, *self.rollout_sync.replica_processes()]]

    @contextlib.contextmanager
    def _leaving_on_failure(self) -> Iterator[None]:
        """Nobody gets our nodes while weights, KV cache or optimizer states of a failed job are still mapped there."""
        try:
            yield
        except BaseException as error:
            try:
                self.phases.fail(f"its driver ended with {type(error).__name__}")
            finally:
                self.phases.log.close()
            raise

    def close(self) -> None:
        """Give everything back: lease, coordinator connection, event log."""
        try:
            self.phases.end()
        finally:
            self.phases.mux.close()
            self.phases.log.close()
            shutil.rmtree(self.settings.directory, ignore_errors=True)


@register_trainer("mux_separate")
class PPOTrainerMuxSeparate(PPOTrainerMux):
    """A rollout pool and a training pool; other jobs train while this one generates, and the other way round."""


@register_trainer("mux_colocate")
class PPOTrainerMuxColocate(PPOTrainerMux):
    """One pool: rollout and training take turns on the same GPUs, within the job as well as between jobs."""

    _colocated = True


def _open_log(settings) -> Any:
    from verl_mux.worker_settings import open_worker_log

    return open_worker_log(settings, "trainer", 0)


def _sum_tags(parts: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Figures by tag over ranks or replicas: bytes add up, the slowest one's seconds count."""
    totals: dict[str, dict[str, float]] = {}
    for figures in parts:
        for tag, figure in figures.items():
            entry = totals.setdefault(tag.partition(":")[0], {"bytes": 0.0, "seconds": 0.0})
            entry["seconds"] = max(entry["seconds"], figure["seconds"])
            for name in ("bytes", "mapped"):
                if name in figure:
                    entry[name] = entry.get(name, 0.0) + figure[name]
    return totals
