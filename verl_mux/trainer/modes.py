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
import functools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import RayTaskError
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.single_controller.ray.base import ResourcePoolManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.utils.device import get_device_name

from verl_mux.config import completion
from verl_mux.config.preflight import connect_job, connect_to_grow
from verl_mux.config.schema import check
from verl_mux.config.told import told
from verl_mux.coordinator.bus.client import Lease
from verl_mux.coordinator.bus.messages import Member
from verl_mux.errors import Failure
from verl_mux.memory.moved import Moves, total
from verl_mux.places.ray_nodes import ray_nodes
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.step_metrics import metrics_of_step
from verl_mux.rollout.control.units import Unit
from verl_mux.sync.manager import MuxCheckpointManager
from verl_mux.trainer import stock_profile  # noqa: F401  (registers at import)
from verl_mux.trainer.actor_watch import ActorWatch, actors_of_rollout, end_process
from verl_mux.trainer.host_watch import HostWatch, hosts_of
from verl_mux.trainer.leaving import LeavesToMove, Leaving
from verl_mux.trainer.phases import Phases
from verl_mux.trainer.replay_buffer import MuxReplayBuffer
from verl_mux.trainer.rollout_side import RolloutSide
from verl_mux.trainer.suspend import EngineWeights, Suspension, sleep_level
from verl_mux.trainer.tracked_tables import log_tables
from verl_mux.trainer.worker_groups import (
    AfterInitLease,
    check_ranks,
    checkpoint_to_resume,
    placed_pools,
    settle_nodes,
)
from verl_mux.trainer.workers import MuxActorWorker, MuxTrainingWorker
from verl_mux.worker_settings import node_of, open_worker_log

# Steps; after the first three, in which states come that were not there before.
_HOST_MEMORY_EVERY = 10


class OffPolicyError(RuntimeError):
    """A sample was generated with other weights than the trainer's of this step."""


class PPOTrainerMux(PPOTrainer):
    """What both modes share. See the module's docstring for a step's life."""

    _enable_hybrid_replicas = False
    _colocated = False
    trainer_is_awake = False  # its states are on the device
    resource_pool_manager: ResourcePoolManager

    def __init__(self, config: DictConfig) -> None:
        mux = check(config)
        assert mux is not None, "only our trainer modes are registered with this class"
        self._cpu = get_device_name() == "cpu"
        completion.complete(config, mux, self._cpu)
        self._connect(config, mux)
        with self._leaving_on_failure():
            super().__init__(config)
            self.rollout = RolloutSide(self, mux.rollout)

    def _connect(self, config: DictConfig, mux) -> None:
        client = connect_job(config, mux)
        try:
            nodes = settle_nodes(client, config, self._colocated)
        except BaseException:
            client.close()
            raise
        mux.nodes.rollout, mux.nodes.train = nodes.rollout, nodes.train
        self.settings = completion.hand_to_workers(config, mux, nodes.places, self._cpu, checkpoint_to_resume(config))
        self.connect_to_grow = functools.partial(connect_to_grow, config, mux)
        self.phases = Phases(client, open_worker_log(self.settings, "trainer", 0))
        self.leaving = Leaving(client, mux.move_note)
        self.hosts = self._watch_hosts({*nodes.rollout, *nodes.train})
        self.phases.log.log(events.JOB_KEYS, extra={"keys": told(config)}, step=0)
        self._rollout_began = 0.0
        self.weights = EngineWeights()
        self.phases.guard(Suspension(self).suspend)

    def _watch_hosts(self, nodes: Iterable[str]) -> HostWatch:
        """One that is cut off for longer than a lease ends the job, as losing the driver's would."""
        limit_s = self.phases.mux.lease_timeout
        found = hosts_of(nodes, ray_nodes(), ray.util.get_node_ip_address()) if limit_s is not None else {}
        return HostWatch(found, limit_s or 0.0, functools.partial(end_process, self.phases))

    # ---------------------------------------------------------------- set-up

    def init(self) -> None:
        """verl's init; leases and event log do not outlive a failure."""
        with self._leaving_on_failure():
            super().init()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.resource_pool_manager = placed_pools(self.resource_pool_manager, self.settings)
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
        rollout = self.config.actor_rollout_ref.rollout
        buffer.samples_of_prompt = {"train": rollout.n, "val": rollout.val_kwargs.n}
        buffer.on_progress = self.tell_progress
        return buffer

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """verl's, which also draws others in the place of prompts that failed."""
        self.watch.check()
        return super()._add_prompts_to_generate(num_prompts)

    def tell_progress(self, done: int, total: int) -> None:
        """Of a rollout, in samples. Raises DeadActor where one that it needs is no more: nobody else gets our nodes otherwise."""
        self.watch.check()
        self.phases.mux.progress(done, total)

    critic_wg = AfterInitLease()
    actor_rollout_wg = AfterInitLease()

    def before_device(self, group: Any) -> None:
        """Worker processes have started, imported and read their weights from disk by now: the lease is held for the seconds that
        map memory and no longer."""
        if self.phases.lease is None:
            ranks = group.mux_where()
            check_ranks([at for at, _ in ranks], self.settings)
            self.phases.mux.members([process for _, process in ranks])
            self.phases.begin("init", step=0, nodes=self.settings.train_nodes)

    def _setup(self) -> None:
        # Imports the engine: only where one of our modes runs.
        from verl_mux.rollout.engine.replica import MuxLLMServerManager

        self.phases.mux.note("starting workers")
        super()._setup()
        self.sleep_trainer()
        self.phases.end()
        self.phases.mux.note("starting engines")
        pool = self.resource_pool_manager.get_resource_pool(Role.Actor) if self._colocated else None
        self.rollout_server_manager = MuxLLMServerManager.create(
            config=self.config,
            acquire=lambda: self.phases.begin("init", step=0, nodes=self.settings.rollout_nodes),
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
        from verl_mux.rollout.worker.server_client import MuxServerClient

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
            self.agent_loop_manager = agent_loop_manager
            watch = ActorWatch(actors_of_rollout(self), functools.partial(end_process, self.phases))
            with self.rollout.running(), watch as self.watch:
                say_goodbye = self._fit(agent_loop_manager)
        self.close(say_goodbye)

    def _fit(self, agent_loop_manager) -> Callable[[], None]:
        """Returns with what words to leave the coordinator."""
        try:
            super().fit(agent_loop_manager)
        except LeavesToMove:
            self._shutdown_dump_executor()
            self.leaving.leave_note()
            return self.leaving.say_goodbye
        return self.phases.mux.close

    def on_step_begin(self) -> None:
        self.leaving.before_step()
        self.phases.log.step = self.global_steps
        self._step_began = time.perf_counter()

    def prepare_step(self) -> dict:
        self._begin_rollout(version=self.global_steps - 1, grows=True)
        if self.rollout.control is None:
            return super().prepare_step()
        self.rollout.control.begin(self.global_steps, self.config.data.train_batch_size)
        return {}

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        return self.rollout.next_batch(num_prompts)

    def draw_from_data(self, count: int) -> TensorDict:
        """So many new prompts, as the data loader hands them out."""
        return super()._next_train_batch(count)

    def on_sample_end(self) -> None:
        ready = time.perf_counter()
        if self.curr_step_profile:
            self._stop_rollout_profiling()
        self._end_rollout()
        self.phases.log.log(events.SAMPLE_READY, time.perf_counter() - ready, step=self.global_steps)
        self.phases.begin("train", self.global_steps)
        with self.phases.using():
            self.wake_trainer()

    def _balance_batch(self, batch: KVBatchMeta, metrics, **kwargs) -> KVBatchMeta:
        self._check_on_policy(batch)
        return super()._balance_batch(batch, metrics, **kwargs)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.phases.part(events.OLD_LOG_PROB, self.global_steps):
            batch = super()._compute_old_log_prob(batch, metrics)
            self.rollout.after_old_log_probs(batch, metrics)
        return batch

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.phases.part(events.REF, self.global_steps):
            return super()._compute_ref_log_prob(batch, metrics)

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.phases.part(events.VALUES, self.global_steps):
            return super()._compute_values(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.phases.part(events.ADV, self.global_steps):
            return super()._compute_advantage(batch, metrics)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.phases.part(events.UPDATE_CRITIC, self.global_steps):
            return super()._update_critic(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.phases.part(events.UPDATE_ACTOR, self.global_steps):
            return super()._update_actor(batch, metrics)

    def _save_checkpoint(self) -> None:
        with self.phases.part(events.SAVE_CHECKPOINT, self.global_steps):
            self.rollout.save()
            super()._save_checkpoint()
        self.leaving.saved(self.global_steps)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self.rollout.load()

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        if self.rollout.control is None:
            return super()._reissue_inflight_prompts(partition_id)
        return self.rollout.restore_waiting(partition_id)

    def on_step_end(self) -> None:
        self.leaving.save(self)
        with self.phases.using():
            with marked_timer("mux_sleep", self.timing_raw):
                self.sleep_trainer()
            self.phases.end()  # before a fence could take the memory up again
        if self.phases.mux.address is not None and (self.global_steps <= 3 or self.global_steps % _HOST_MEMORY_EVERY == 0):
            self._tell_host_memory()

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        seconds = self.phases.take_seconds()
        metrics.update({f"mux/seconds/{name}": value for name, value in seconds.items()})
        extra = {"reward": float(metrics.get("critic/score/mean", 0.0)), "seconds": seconds,
                 "loss": float(metrics.get("actor/pg_loss", 0.0)), "grad_norm": float(metrics.get("actor/grad_norm", 0.0)),
                 "response_length": float(metrics.get("response_length/mean", 0.0)),
                 "tokens": int(metrics.get("perf/total_num_tokens", 0))}  # fmt: skip
        self.phases.log.log(events.STEP, time.perf_counter() - self._step_began, extra=extra, step=global_steps)
        tell = functools.partial(log_tables, self.logger, self.phases.log, step=global_steps, every=self.settings.tables)
        metrics.update(metrics_of_step(self.phases.log, global_steps, also=tell))
        told = {k: v for k, v in extra.items() if isinstance(v, (int, float))}
        self.phases.mux.report_step(global_steps, told, self.total_training_steps)

    def on_validate_begin(self) -> None:
        # A validation follows an update (or comes before the first), so it runs on the newest weights, in a lease of its own.
        self._begin_rollout(version=self.global_steps)

    def on_validate_end(self) -> None:
        # The next rollout comes before the next update.
        self._end_rollout(same_weights_next=True)

    def _validate(self) -> dict[str, float]:
        with self.phases.log.span(events.VALIDATE, step=self.global_steps):
            return super()._validate()

    # ---------------------------------------------------------------- phases

    def _begin_rollout(self, version: int, grows: bool = False) -> None:
        """Rollout lease, weights of `version` on every rollout worker, KV cache mapped.

        Version k is the trainer's weights after step k.
        """
        step = max(self.global_steps, 1)
        self.phases.begin("rollout", step, nodes=self.rollout.own_nodes)
        self.weights.begin(version, vacant=self.rollout.lent_replicas)
        self.rollout.nodes_are_held(step, grows)
        with self.phases.using():
            self.fill_engines()
        self.rollout.engines_are_back(grows)
        self.phases.mux.note(events.GENERATE_PHASE)
        self._rollout_began = time.perf_counter()

    def fill_engines(self) -> None:
        """Memory mapped and filled, in the order in which it is needed; weights that come back from the host need no sync."""
        assert self.phases.lease is not None
        replicas = self.held_replicas()
        self._move_rollout("wake", ["weights"], replicas)
        if self.weights.need_sync:
            self._sync()
        self._move_rollout("wake", ["kv_cache"], replicas)
        self.weights.filled()

    def held_replicas(self) -> list[int] | None:
        """Those that the rollout has nodes for; None: all."""
        return self.weights.replicas(len(self.rollout_server_manager.get_replicas()))

    def _sync(self) -> None:
        assert self.phases.lease is not None
        with self.phases.part(events.SYNC, self.global_steps, version=self.weights.version) as extra:
            told = self.rollout_sync.update_weights(self.weights.version, self.phases.lease.token, self.weights.vacant)
            self._pending_sync_metrics = {key: value for key, value in told.items() if key.startswith("mux/")}
            of = {name.removeprefix("mux/sync/"): value for name, value in told.items()}.get
            extra["bytes"], extra["spared_bytes"], extra["ranks"] = of("bytes"), of("spared_bytes"), of("ranks")
            extra["slow_bytes"], extra["fast_bytes"], extra["local_bytes"] = of("slow_bytes"), of("fast_bytes"), of("local_bytes")
            extra["gather_seconds"], extra["send_seconds"] = of("gather_seconds"), of("send_seconds")
            extra["wait_seconds"], extra["receive_seconds"] = of("wait_seconds"), of("receive_seconds")
            extra["load_seconds"], extra["stream_gb_per_s"] = of("load_seconds"), of("stream_gb_per_s")

    def _end_rollout(self, same_weights_next: bool = False) -> None:
        generated = time.perf_counter() - self._rollout_began
        self.phases.log.log(events.GENERATE_PHASE, generated, step=self.global_steps)
        self.phases.add_seconds("generate", generated)
        self.rollout.is_over()
        level = 2 if self.weights.vacant else sleep_level(self.settings.device, same_weights_next)
        with self.phases.using():
            self._move_rollout("sleep", None, level=level)
            self.weights.slept(level)
            self.phases.end()  # before a fence could take the memory up again

    def _move_rollout(
        self, verb: str, tags: list[str] | None, replicas: Sequence[int] | None = None, level: int = 2, lease: Lease | None = None
    ) -> None:
        """`lease`: under which they wake; None: the phase's."""
        lease = lease or self.phases.lease
        token = lease.token if verb == "wake" and lease is not None else None
        moved = self.rollout_server_manager.move(verb, tags, replicas, token, level)
        self.phases.moved(verb, "rollout", self.global_steps, moved, log=False)

    def vacate(self, unit: Unit) -> None:
        """These nodes' engines are idle for the rest of the rollout: others may have the nodes."""
        with self.phases.using():
            self.part(unit)
            self.phases.shrink(list(unit.nodes))

    def part(self, unit: Unit) -> None:
        """Put engines to sleep before the others. Whoever calls has the device."""
        self._move_rollout("sleep", None, unit.replicas)
        self.weights.vacant.update(unit.replicas)

    def join(self, unit: Unit, lease: Lease) -> None:
        """Wake engines under a lease of their own while the others generate, with the same weights. Whoever calls has the
        device."""
        self._move_rollout("wake", ["weights"], unit.replicas, lease=lease)
        self.rollout_server_manager.load_synced(unit.replicas, self.weights.version, lease.token)
        self._move_rollout("wake", ["kv_cache"], unit.replicas, lease=lease)
        self.weights.vacant.difference_update(unit.replicas)

    def sleep_trainer(self) -> None:
        self.trainer_is_awake = False
        self._trainer_moved("sleep", [group.mux_sleep() for group in self.train_groups()])

    def wake_trainer(self) -> None:
        assert self.phases.lease is not None
        token = self.phases.lease.token
        self._trainer_moved("wake", [group.mux_wake(token) for group in self.train_groups()])
        self.trainer_is_awake = True

    def _trainer_moved(self, verb: str, groups: list[list[Moves]]) -> None:
        # All groups are on the same devices: rank i of one has its node, and moves before or after rank i of the next.
        ranks = [total(moves, seconds=sum) for moves in zip(*groups, strict=True)]
        nodes = self.settings.train_nodes
        parts = [(node_of(nodes, rank, len(ranks)), moves) for rank, moves in enumerate(ranks)]
        self.phases.moved(verb, "train", self.global_steps, parts)

    def _tell_host_memory(self) -> None:
        """While all of this job sleeps and it holds no node: nobody waits for it, and all host copies are there."""
        nodes, told = self.settings.train_nodes, self.rollout_server_manager.host_memory()
        for group in self.train_groups():
            ranks = group.mux_host_memory()
            told += [(node_of(nodes, rank, len(ranks)), process, kinds) for rank, (process, kinds) in enumerate(ranks)]
        self.phases.host_memory(told)

    def train_groups(self) -> list:
        groups = [self.actor_rollout_wg, getattr(self, "critic_wg", None), getattr(self, "ref_policy_wg", None)]
        return list({id(group): group for group in groups if group is not None}.values())

    def _check_on_policy(self, batch: KVBatchMeta) -> None:
        """Every sample of step k was generated, from first to last token, with the weights after step k-1."""
        expected = self.global_steps - 1
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if not tag.get("is_padding", False) and not self.rollout.was_generated_by(tag, expected):
                versions = (tag.get("min_global_steps"), tag.get("max_global_steps"))
                raise OffPolicyError(
                    f"step {self.global_steps} trains on weights of version {expected}; sample {key} has {versions}"
                )

    def _processes(self) -> list[Member]:
        """All processes of this job that hold device memory."""
        ranks = [process for group in self.train_groups() for _, process in group.mux_where()]
        return list(dict.fromkeys([*ranks, *self.rollout_server_manager.processes()]))  # a process has a rank of each group

    @contextlib.contextmanager
    def _leaving_on_failure(self) -> Iterator[None]:
        """Nobody gets our nodes while weights, KV cache or optimizer states of a failed job are still mapped there."""
        try:
            yield
        except BaseException as error:
            self.hosts.close()
            try:
                self.phases.fail(_reason(error))
            finally:
                self.phases.log.close()
            raise

    def close(self, say_goodbye: Callable[[], None]) -> None:
        """Give everything back: lease, coordinator connection, event log."""
        self.hosts.close()
        try:
            self.phases.end()
        finally:
            say_goodbye()
            self.phases.log.close()
            shutil.rmtree(self.settings.directory, ignore_errors=True)


def _reason(error: BaseException) -> str:
    """Why a job ended, for whoever asks the coordinator: a failure's own words, an actor's among them."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return str(cause) if isinstance(cause, Failure) else f"its driver ended with {type(error).__name__}"


@register_trainer("mux_separate")
class PPOTrainerMuxSeparate(PPOTrainerMux):
    """A rollout pool and a training pool; other jobs train while this one generates, and the other way round."""


@register_trainer("mux_colocate")
class PPOTrainerMuxColocate(PPOTrainerMux):
    """One pool: rollout and training take turns on the same GPUs, within the job as well as between jobs."""

    _colocated = True
