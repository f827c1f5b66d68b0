"""verl's trainer modes `mux_separate` and `mux_colocate`: strictly on-policy PPO/GRPO whose phases take turns with other jobs'.

Runs in the trainer's driver. verl imports it right after its own trainers (plugin.py) and calls the methods that override its
own; `register_trainer` at the end is the door.

    verl's loop        ours                                                       processes it talks to
    -----------        ----                                                       ---------------------
    on_step_begin      leave here, if the coordinator moves the job
    prepare_step       ROLLOUT lease -----------------------------------------    coordinator
                       engines.fill: weight memory -> SYNC from the trainers'     engines, training workers
                       host copies -> KV cache
                       rollout.begin: launch the step's samples one by one        agent loop workers -> engines
                       (or verl launches whole prompt groups)
    replay_buffer      rollout.run: cut off, let go on, until the batch is        agent loop workers
      .sample          complete (or verl's wait)
    on_sample_end      engines asleep -> rollout lease back                       engines, coordinator
                       TRAIN lease -> trainer states from host memory             coordinator, training workers
    _balance_batch     every sample's weights are those of the step
    _compute_...,      verl's passes, each timed and under the lease              training workers
    _update_...
    on_step_end        trainer states to host memory -> train lease back          training workers, coordinator

mux_separate has a rollout pool and a training pool; in mux_colocate both phases run on the training pool's GPUs. Version k of
the weights is the trainer's after step k.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import RayTaskError
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.single_controller.ray.base import ResourcePoolManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.utils.device import get_device_name
from verl.utils.fs import local_mkdir_safe

from verl_mux.config import completion
from verl_mux.config.job_checks import check
from verl_mux.config.preflight import connect_job, connect_to_grow
from verl_mux.config.schema import MuxConfig
from verl_mux.coordinator.bus.client import Lease
from verl_mux.errors import Failure
from verl_mux.memory.tags import Moves, total
from verl_mux.places.ray_nodes import ray_nodes
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.step_metrics import metrics_of_step
from verl_mux.rollout.control.replica_plan import Room
from verl_mux.sync.engine import MuxCheckpointManager
from verl_mux.trainer import job_hosts, stock_modes  # noqa: F401  (stock_modes wraps the `fit` of verl's own modes)
from verl_mux.trainer.job_hosts import PlacedPools
from verl_mux.trainer.phases import LeavesToMove, Leaving, Phases
from verl_mux.trainer.prompts import Prompts
from verl_mux.trainer.replay_buffer import MuxReplayBuffer
from verl_mux.trainer.replica_moves import Growth, ReplicaMoves, TailMigration
from verl_mux.trainer.rollout_engines import RolloutEngines
from verl_mux.trainer.step_rollout import StepRollout, load, may_train_on
from verl_mux.trainer.workers import MuxActorWorker, MuxTrainingWorker
from verl_mux.worker_settings import node_of, open_worker_log

# Host memory is reported every this many steps; and after the first three, in which states come that were not there before.
_HOST_MEMORY_EVERY = 10


class OffPolicyError(RuntimeError):
    """A sample was generated with other weights than the trainer's of this step."""


def _timed_pass(name: str, event: str) -> Callable:
    """verl's pass of this name over a batch, as a part of the training phase: logged, under a lease that may be used."""

    def timed(self: PPOTrainerMux, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.phases.part(event, self.global_steps):
            return getattr(PPOTrainer, name)(self, batch, metrics)

    return timed


class PPOTrainerMux(PPOTrainer):
    """What both modes share. See the module's docstring for a step's life."""

    _enable_hybrid_replicas = False
    _colocated = False
    resource_pool_manager: ResourcePoolManager
    global_steps = 0  # verl sets it when it looks for a checkpoint

    def __init__(self, config: DictConfig) -> None:
        mux = check(config)
        assert mux is not None, "only our trainer modes are registered with this class"
        self._mux_config = mux
        self.states_are_awake = False  # the trainer's, on the device
        self.moves = ReplicaMoves()
        self.rollout: StepRollout | None = None  # None: verl launches the samples
        self._saved_rollout: dict[str, Any] | None = None
        cpu = get_device_name() == "cpu"
        completion.complete(config, mux, cpu)
        self._connect(config, mux, cpu)
        with self._leaving_on_failure():
            super().__init__(config)

    def _connect(self, config: DictConfig, mux: MuxConfig, cpu: bool) -> None:
        client = connect_job(config, mux)
        try:
            mux.nodes.rollout, mux.nodes.train, places = job_hosts.settle_nodes(client, config, self._colocated)
        except BaseException:
            client.close()
            raise
        self.settings = completion.hand_to_workers(config, mux, places, cpu, job_hosts.checkpoint_to_resume(config))
        self.phases = Phases(client, open_worker_log(self.settings, "trainer", 0))
        self.leaving = Leaving(client, mux.move_note)
        # A host that is cut off for longer than a lease lasts ends the job, as losing the driver's host would.
        limit_s = client.lease_timeout
        hosts = {} if limit_s is None else job_hosts.hosts_of(places, ray_nodes(), ray.util.get_node_ip_address())
        self.hosts = job_hosts.HostWatch(hosts, limit_s or 0.0, functools.partial(job_hosts.end_process, self.phases))
        self.phases.log.log(events.JOB_KEYS, extra={"keys": completion.logged_keys(config)}, step=0)
        self.phases.guard(self.suspend)

    # ---------------------------------------------------------------- set-up

    def init(self) -> None:
        with self._leaving_on_failure():
            super().init()

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer, groups = super()._build_replay_buffer(), self.config.algorithm.get("filter_groups")
        # A sampler of the user's own filters by itself.
        if groups and groups.get("enable") and isinstance(buffer, MuxReplayBuffer):
            batches = groups.get("max_inflight_gen_batches", 1)
            buffer.replace_filtered(groups.metric, self.config.data.train_batch_size, batches)
        return buffer

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self.prompts = Prompts(self, self._mux_config.rollout)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        settings = self.settings
        nodes = {node: (settings.places[node], 0) for node in settings.train_nodes} if settings.is_bound("train") else {}
        theirs, leave = self.resource_pool_manager, self._leave_train_nodes
        self.resource_pool_manager = PlacedPools(theirs.resource_pool_spec, theirs.mapping, nodes=nodes, before_own=leave)
        for role in (Role.Actor, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(MuxActorWorker)
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = ray.remote(MuxTrainingWorker)

    def __setattr__(self, name: str, value: Any) -> None:
        """verl's `_setup` starts all worker processes, sets these attributes, and calls nothing of ours before a group first
        touches its device: the init lease is taken here."""
        if name in ("critic_wg", "actor_rollout_wg"):
            self._before_device(value)
        super().__setattr__(name, value)

    def _before_device(self, group: Any) -> None:
        """Worker processes have started, imported and read their weights from disk by now: the lease is held for the seconds that
        map memory and no longer."""
        if self.phases.lease is None:
            ranks = group.mux_where()
            job_hosts.check_ranks([at for at, _ in ranks], self.settings)
            self.phases.mux.members([process for _, process in ranks])
            self.phases.begin("init", step=0, nodes=self.settings.train_nodes)
            self.phases.mux.note("loading the model")

    def _setup(self) -> None:
        # Imports the engine: only where one of our modes runs.
        from verl_mux.rollout.engine.replica import MuxLLMServerManager

        self.phases.mux.note("starting workers")
        super()._setup()
        self._leave_train_nodes()
        self.phases.mux.note("starting engines")
        pool = self.resource_pool_manager.get_resource_pool(Role.Actor) if self._colocated else None
        self.rollout_server_manager = MuxLLMServerManager.create(
            config=self.config,
            acquire=lambda: self.phases.begin("init", step=0, nodes=self.settings.rollout_nodes),
            release=lambda _lease: self.phases.end(),
            balancer=self.llm_server_manager.global_load_balancer,
            colocate_with=pool,
        )
        sync = MuxCheckpointManager(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=self.rollout_server_manager.get_replicas(),
        )
        self.engines = RolloutEngines(self.rollout_server_manager, sync, self.phases, self.settings.device.sleep_level)
        self.engines.bring_to_hosts(self.global_steps)
        ranks = [process for group in self.train_groups() for _, process in group.mux_where()]
        # All that hold device memory; a process has a rank of each group.
        self.phases.mux.members(list(dict.fromkeys([*ranks, *self.rollout_server_manager.each("processes", None)])))

    def _leave_train_nodes(self) -> None:
        if self.phases.lease is not None:
            self.sleep_states()
            self.phases.end()

    def get_llm_client(self):
        from verl_mux.rollout.worker.server_client import MuxServerClient

        return self.rollout_server_manager.get_client(client_cls=MuxServerClient)

    def _rollout_server_managers(self) -> list:
        manager = getattr(self, "rollout_server_manager", None)
        return [*super()._rollout_server_managers(), *([manager] if manager else [])]

    def _get_n_gpus_for_throughput(self) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        return self.resource_pool_manager.get_n_gpus() + (0 if self._colocated else rollout.n_gpus_per_node * rollout.nnodes)

    # ---------------------------------------------------------------- fit

    def fit(self, agent_loop_manager) -> None:
        """verl's fit; leases go back on every way out, after an exception as soon as the processes are gone."""
        with self._leaving_on_failure():
            self.agent_loop_manager = agent_loop_manager
            workers = agent_loop_manager.agent_loop_workers
            actors = job_hosts.actors_of_rollout(
                self.rollout_server_manager, workers, self.get_reward_handles() or [], job_hosts.own_replicas(self)
            )
            end = functools.partial(job_hosts.end_process, self.phases)
            with self._make_moves(workers) as self.moves, job_hosts.ActorWatch(actors, end) as self.watch:
                self._start_rollout(workers)
                close: Callable[[], None] = self.phases.mux.close
                try:
                    super().fit(agent_loop_manager)
                except LeavesToMove:
                    self._shutdown_dump_executor()
                    self.leaving.leave_note()
                    close = self.leaving.close_to_move
        self.hosts.close()
        try:
            self.phases.end()
        finally:
            close()
            self.phases.log.close()
            self._forget_files()

    def _forget_files(self) -> None:
        """The servers remove theirs, each from its host."""
        with contextlib.suppress(Exception):  # the job ends, and maybe for an error of its own
            self.rollout_server_manager.each("forget", None)

    def _start_rollout(self, workers: list) -> None:
        keys, rollout = self._mux_config.rollout, self.config.actor_rollout_ref.rollout
        if keys.controlled:
            self.rollout = StepRollout(self, keys, self.prompts, self.phases, self.watch, self.moves, self._saved_rollout)
        if isinstance(self.replay_buffer, MuxReplayBuffer):
            samples = {"train": rollout.n, "val": rollout.val_kwargs.n}
            self.replay_buffer.start(workers, self.phases.mux, self.watch, self.rollout, samples)

    def _make_moves(self, workers: list) -> ReplicaMoves:
        """Replicas that leave a rollout early or join it late, where the keys ask for that."""
        keys, data, at_once = self._mux_config.rollout, self.config.data, self.config.actor_rollout_ref.rollout.max_num_seqs
        room = Room(data.max_response_length, at_once, (at_once or 0) * (data.max_prompt_length + data.max_response_length))
        if keys.migration:
            return TailMigration(self.engines.units("mux.rollout.migration=True"), self.engines, workers, room)
        if keys.growth.own is not None:
            connect = functools.partial(connect_to_grow, self.config, self._mux_config)
            return Growth(keys.growth.own, self.engines, workers, room, connect)
        return ReplicaMoves()

    # ---------------------------------------------------------------- a step

    def on_step_begin(self) -> None:
        self.leaving.before_step()
        self.phases.log.step = self.global_steps
        self._step_began = time.perf_counter()

    def prepare_step(self) -> dict:
        self._begin_rollout(version=self.global_steps - 1, moves=True)
        if self.rollout is None:
            return super().prepare_step()
        self.rollout.begin(self.global_steps, self.config.data.train_batch_size)
        return {}

    def on_sample_end(self) -> None:
        ready = time.perf_counter()
        if self.curr_step_profile:
            self._stop_rollout_profiling()
        self._end_rollout()
        self.phases.log.log(events.SAMPLE_READY, time.perf_counter() - ready, step=self.global_steps)
        self.phases.begin("train", self.global_steps)
        with self.phases.using():
            self.wake_states()

    def _balance_batch(self, batch: KVBatchMeta, metrics, **kwargs) -> KVBatchMeta:
        self._check_on_policy(batch)
        return super()._balance_batch(batch, metrics, **kwargs)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.phases.part(events.OLD_LOG_PROB, self.global_steps):
            batch = super()._compute_old_log_prob(batch, metrics)
            self.prompts.trained(batch)
            figures = self.prompts.window.figures() if self.prompts.window is not None else {}
            if self.rollout is not None:
                figures |= self.rollout.machine.metrics.as_dict() | self.moves.metrics
                self.rollout.treat_older_tokens(batch, metrics)
            metrics.update({f"mux/rollout/{key}": value for key, value in figures.items()})
        return batch

    _compute_ref_log_prob = _timed_pass("_compute_ref_log_prob", events.REF)
    _compute_values = _timed_pass("_compute_values", events.VALUES)
    _compute_advantage = _timed_pass("_compute_advantage", events.ADV)
    _update_critic = _timed_pass("_update_critic", events.UPDATE_CRITIC)
    _update_actor = _timed_pass("_update_actor", events.UPDATE_ACTOR)

    def on_step_end(self) -> None:
        self.leaving.save(self.global_steps, self.total_training_steps, self._save_checkpoint)
        with self.phases.using():
            with marked_timer("mux_sleep", self.timing_raw):
                self.sleep_states()
            self.phases.end()  # before a fence could take the memory up again
        if self.phases.mux.address is not None and (self.global_steps <= 3 or self.global_steps % _HOST_MEMORY_EVERY == 0):
            self._report_host_memory()

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        seconds = self.phases.take_seconds()
        metrics.update({f"mux/seconds/{name}": value for name, value in seconds.items()})
        extra = {"reward": float(metrics.get("critic/score/mean", 0.0)), "seconds": seconds,
                 "loss": float(metrics.get("actor/pg_loss", 0.0)), "grad_norm": float(metrics.get("actor/grad_norm", 0.0)),
                 "response_length": float(metrics.get("response_length/mean", 0.0)),
                 "tokens": int(metrics.get("perf/total_num_tokens", 0))}  # fmt: skip
        self.phases.log.log(events.STEP, time.perf_counter() - self._step_began, extra=extra, step=global_steps)
        metrics.update(metrics_of_step(self.phases.log, global_steps))
        reported = {k: v for k, v in extra.items() if isinstance(v, (int, float))}
        self.phases.mux.report_step(global_steps, reported, self.total_training_steps)

    def _consume_sync_metrics(self) -> dict:
        figures, self.engines.sync_figures = self.engines.sync_figures, {}
        return figures

    def on_validate_begin(self) -> None:
        # A validation follows an update (or comes before the first), so it runs on the newest weights, in a lease of its own.
        self._begin_rollout(version=self.global_steps)

    def on_validate_end(self) -> None:
        self._end_rollout(same_weights_next=True)  # the next rollout comes before the next update

    def _validate(self) -> dict[str, float]:
        with self.phases.log.span(events.VALIDATE, step=self.global_steps):
            return super()._validate()

    # ---------------------------------------------------------------- prompts and checkpoints, where verl asks

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        return self.prompts.next_batch(num_prompts)

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        self.watch.check()  # verl draws others in the place of prompts that failed: without end where an actor died
        count = self.prompts.room(num_prompts)
        return super()._add_prompts_to_generate(count) if count else 0

    def _save_checkpoint(self) -> None:
        with self.phases.part(events.SAVE_CHECKPOINT, self.global_steps):
            folder = self._checkpoint_folder()
            local_mkdir_safe(str(folder))
            for part in (self.prompts.window, self.rollout):
                if part is not None:
                    part.save(folder)
            super()._save_checkpoint()  # which writes, at its end, which checkpoint is the latest
        self.leaving.saved = self.global_steps

    def _load_checkpoint(self) -> None:
        if self.settings.resume and self.phases.lease is None:  # what has GPUs of its own has started meanwhile
            self.phases.begin("init", step=0, nodes=self.settings.train_nodes)
            self.wake_states()
        super()._load_checkpoint()
        if self.global_steps:
            trainer = self.config.trainer
            folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else self._checkpoint_folder()
            if self.prompts.window is not None:
                self.prompts.window.load(folder)
            self._saved_rollout = load(folder)

    def _checkpoint_folder(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        return (self.rollout.restore_waiting if self.rollout is not None else super()._reissue_inflight_prompts)(partition_id)

    # ---------------------------------------------------------------- phases

    def _begin_rollout(self, version: int, moves: bool = False) -> None:
        """Rollout lease, weights of `version` on every rollout worker, KV cache mapped. moves: replicas may join later."""
        step = max(self.global_steps, 1)
        self.phases.begin("rollout", step, nodes=self.moves.own_nodes)
        self.engines.begin(version, self.global_steps, vacant=self.moves.lent)
        if moves:
            self.moves.nodes_are_held(step)
        with self.phases.using():
            self.engines.fill()
        self.moves.engines_are_awake()
        self.phases.mux.note(events.GENERATE_PHASE)
        self._rollout_began = time.perf_counter()

    def _end_rollout(self, same_weights_next: bool = False) -> None:
        generated = time.perf_counter() - self._rollout_began
        self.phases.log.log(events.GENERATE_PHASE, generated, step=self.global_steps)
        self.phases.seconds["generate"] += generated
        self.moves.rollout_ends()
        with self.phases.using():
            self.engines.sleep(same_weights_next)
            self.phases.end()  # before a fence could take the memory up again

    def sleep_states(self) -> None:
        self.states_are_awake = False
        self._states_moved("sleep", [group.mux_sleep() for group in self.train_groups()])

    def wake_states(self) -> None:
        """Under the held lease."""
        assert self.phases.lease is not None
        token = self.phases.lease.token
        self._states_moved("wake", [group.mux_wake(token) for group in self.train_groups()])
        self.states_are_awake = True

    def _states_moved(self, verb: str, groups: list[list[Moves]]) -> None:
        # All groups are on the same devices: rank i of one has its node, and moves before or after rank i of the next.
        ranks = [total(moves, seconds=sum) for moves in zip(*groups, strict=True)]
        nodes = self.settings.train_nodes
        parts = [(node_of(nodes, rank, len(ranks)), moves) for rank, moves in enumerate(ranks)]
        self.phases.moved(verb, "train", self.global_steps, parts)

    def suspend(self, lease: Lease) -> Callable[[], None]:
        """The lease may not be used for a while: what its phase has on the device sleeps. Returns what takes it up again.

        What the phase has not brought onto the device yet stays where it is; an init phase is not broken off.
        """
        if lease.phase == "rollout" and self.engines.are_awake:
            self.moves.leave()
            self.engines.pause()
            return lambda: self.engines.reopen(lease)
        if lease.phase != "train" or not self.states_are_awake:
            return lambda: None

        def resume() -> None:
            for group in self.train_groups():
                group.mux_reopen(lease.token)
            self.wake_states()

        self.sleep_states()
        return resume

    def _report_host_memory(self) -> None:
        """While all of this job sleeps and it holds no node: no other job waits for it, and all host copies are there."""
        nodes, held = self.settings.train_nodes, self.rollout_server_manager.each("host_memory", None)
        for group in self.train_groups():
            ranks = group.mux_host_memory()
            held += [(node_of(nodes, rank, len(ranks)), process, kinds) for rank, (process, kinds) in enumerate(ranks)]
        self.phases.host_memory(held)

    def train_groups(self) -> list:
        groups = [self.actor_rollout_wg, getattr(self, "critic_wg", None), getattr(self, "ref_policy_wg", None)]
        return list({id(group): group for group in groups if group is not None}.values())

    def _check_on_policy(self, batch: KVBatchMeta) -> None:
        """Every sample of step k was generated, from first to last token, with the weights after step k-1; where responses go on
        under newer weights, with no older ones than the limit of lag allows."""
        expected, keys = self.global_steps - 1, self._mux_config.rollout
        lag = keys.lag_limit(self.config.trainer.v1.sampler.max_off_policy_threshold)
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if not tag.get("is_padding", False) and not may_train_on(tag, expected, keys, lag):
                versions = (tag.get("min_global_steps"), tag.get("max_global_steps"))
                trains = f"step {self.global_steps} trains on weights of version {expected}"
                raise OffPolicyError(f"{trains}; sample {key} has {versions}")

    # ---------------------------------------------------------------- leaving

    @contextlib.contextmanager
    def _leaving_on_failure(self) -> Iterator[None]:
        """No other job gets our nodes while weights, KV cache or optimizer states of a failed job are still mapped there."""
        try:
            yield
        except BaseException as error:
            self.hosts.close()
            try:
                # For users who ask the coordinator why the job ended: a failure's own words, an actor's among them.
                cause = error.cause if isinstance(error, RayTaskError) else error
                self.phases.fail(str(cause) if isinstance(cause, Failure) else f"its driver ended with {type(error).__name__}")
            finally:
                self.phases.log.close()
                self._forget_files()
            raise


@register_trainer("mux_separate")
class PPOTrainerMuxSeparate(PPOTrainerMux):
    """A rollout pool and a training pool; other jobs train while this one generates, and the other way round."""


@register_trainer("mux_colocate")
class PPOTrainerMuxColocate(PPOTrainerMux):
    """One pool: rollout and training take turns on the same GPUs, within the job as well as between jobs."""

    _colocated = True
