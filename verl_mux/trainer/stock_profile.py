"""The event log for verl's own trainer modes: `+mux=default mux.profile.enable=true trainer.v1.trainer_mode=sync`.

Requests are logged by our agent loop manager, which the preflight puts in place. A step's parts are logged here: each method
below is wrapped on the trainer object at the start of `fit`, where the keys ask for it; without them nothing is touched.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_mux.config.told import told
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.step_metrics import metrics_of_step
from verl_mux.trainer import stock_trigger
from verl_mux.trainer.tracked_tables import log_tables
from verl_mux.worker_settings import WorkerSettings, open_worker_log

_PARTS = {
    "_compute_old_log_prob": events.OLD_LOG_PROB,
    "_compute_ref_log_prob": events.REF,
    "_compute_values": events.VALUES,
    "_compute_advantage": events.ADV,
    "_update_critic": events.UPDATE_CRITIC,
    "_update_actor": events.UPDATE_ACTOR,
    "_save_checkpoint": events.SAVE_CHECKPOINT,
    "_validate": events.VALIDATE,
    "on_sample_end": events.SLEEP,
    "on_step_end": events.SYNC,
    "step": events.STEP,
}


def instrument(trainer: PPOTrainer) -> Any | None:
    """Log the parts of this trainer's steps; the log, or None where no key asks for it."""
    mode = str(trainer.config.trainer.v1.trainer_mode)
    settings = WorkerSettings.from_rollout_config(trainer.config.actor_rollout_ref.rollout)
    if mode.startswith("mux_") or not OmegaConf.select(trainer.config, "mux") or not settings.events_dir:
        return None
    log = open_worker_log(settings, "trainer", 0)
    log.log(events.JOB_KEYS, extra={"keys": told(trainer.config)}, step=0)
    for name, event in _PARTS.items():
        setattr(trainer, name, _timed(getattr(trainer, name), trainer, log, event))
    trainer.replay_buffer.sample = _waiting(trainer.replay_buffer.sample, trainer, log)
    trainer._compute_metrics = _with_metrics(trainer._compute_metrics, trainer, log, settings.tables)
    return log


def _timed(method, trainer: PPOTrainer, log: Any, event: str):
    @functools.wraps(method)
    def timed(*args, **kwargs):
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            log.log(event, time.perf_counter() - started, step=trainer.global_steps)

    return timed


def _waiting(sample, trainer: PPOTrainer, log: Any):
    """The trainer's wait for its samples; a validation's is part of the validation."""

    @functools.wraps(sample)
    def sampled(global_steps, partition_id, batch_size):
        if partition_id == "val":
            return sample(global_steps, partition_id, batch_size)
        return timed(global_steps, partition_id, batch_size)

    timed = _timed(sample, trainer, log, events.SAMPLE_WAIT)
    return sampled


def _with_metrics(method, trainer: PPOTrainer, log: Any, tables_every: int):
    """The report's figures of the step join verl's own, on their way to its trackers."""

    @functools.wraps(method)
    def computed(batch, metrics, *args, **kwargs):
        method(batch, metrics, *args, **kwargs)
        step = trainer.global_steps
        tell = functools.partial(log_tables, trainer.logger, log, step=step, every=tables_every)
        metrics.update(metrics_of_step(log, step, also=tell))

    return computed


def _wrap(fit):
    @functools.wraps(fit)
    def profiled(self, *args, **kwargs):
        log = instrument(self)
        stock_trigger.attach(self, *args, **kwargs)
        try:
            return fit(self, *args, **kwargs)
        finally:
            if log is not None:
                log.close()

    vars(profiled)["verl_mux"] = True
    return profiled


if not getattr(PPOTrainer.fit, "verl_mux", False):
    PPOTrainer.fit = _wrap(PPOTrainer.fit)
