"""What a trainer logs beside verl's own metrics: the event log of verl's own modes, and tables of a step for wandb.

Runs in the trainer's driver. `plugin.py` has verl import it with our modes; it wraps `fit` of every verl trainer, and touches
nothing where no key asks for the event log (`+mux=default mux.profile.enable=true trainer.v1.trainer_mode=sync`). Requests are
logged by our agent loop manager, which the preflight puts in place; a step's parts by the methods wrapped here.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_mux.config.completion import logged_keys
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Line, phases_beside
from verl_mux.profiling.plain.step_metrics import Table, metrics_of_step, step_tables, waits_for_leases
from verl_mux.trainer.replay_buffer import attach_trigger
from verl_mux.worker_settings import WorkerSettings, open_worker_log

WANDB = "wandb"

logger = logging.getLogger(__name__)

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
    log.log(events.JOB_KEYS, extra={"keys": logged_keys(trainer.config)}, step=0)
    for name, event in _PARTS.items():
        setattr(trainer, name, _timed(getattr(trainer, name), trainer, log, event))
    sample = trainer.replay_buffer.sample
    timed_sample = _timed(sample, trainer, log, events.SAMPLE_WAIT)

    @functools.wraps(sample)
    def sampled(global_steps, partition_id, batch_size):
        """The trainer's wait for its samples; a validation's is part of the validation."""
        return (sample if partition_id == "val" else timed_sample)(global_steps, partition_id, batch_size)

    compute_metrics = trainer._compute_metrics

    @functools.wraps(compute_metrics)
    def computed(batch, metrics, *args, **kwargs):
        """The figures that the log gives for the step join verl's own, on their way to its trackers."""
        compute_metrics(batch, metrics, *args, **kwargs)
        metrics.update(step_figures(trainer.logger, log, trainer.global_steps, settings.tables))

    trainer.replay_buffer.sample, trainer._compute_metrics = sampled, computed
    return log


def _timed(method: Callable, trainer: PPOTrainer, log: Any, event: str) -> Callable:
    @functools.wraps(method)
    def timed(*args, **kwargs):
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            log.log(event, time.perf_counter() - started, step=trainer.global_steps)

    return timed


def _wrap(fit: Callable) -> Callable:
    @functools.wraps(fit)
    def profiled(self, *args, **kwargs):
        log = instrument(self)
        attach_trigger(self, *args, **kwargs)
        try:
            return fit(self, *args, **kwargs)
        finally:
            if log is not None:
                log.close()

    vars(profiled)["verl_mux"] = True
    return profiled


if not getattr(PPOTrainer.fit, "verl_mux", False):
    PPOTrainer.fit = _wrap(PPOTrainer.fit)


def step_figures(tracking: Any, log: Any, step: int, tables_every: int) -> dict[str, float]:
    """Of a step, by the job's event log; its tables go to wandb where `tracking`, verl's Tracking, has it."""
    return metrics_of_step(log, step, also=functools.partial(log_tables, tracking, log, step=step, every=tables_every))


def log_tables(tracking: Any, log: Any, lines: list[Line], step: int, every: int) -> None:
    """`mux_tables/*` of a step to wandb, where verl's Tracking has it and the step is a multiple of `every`; 0: never.

    log: the trainer's event log, among whose files `lines` lie. What goes wrong is a warning: tables must not stop training.
    """
    if not every or step % every or WANDB not in tracking.logger:
        return
    try:
        tracking.log(_as_wandb(step_tables(lines, _beside(log, lines))), step, backend=[WANDB])
    except Exception as error:  # whatever a tracker raises
        logger.warning("step %d: its tables did not reach wandb: %s: %s", step, type(error).__name__, error)


def _beside(log: Any, lines: list[Line]) -> Iterable[Line]:
    """Phases of other jobs since this one began to wait for a lease."""
    began = min((line.end - line.seconds for line in waits_for_leases(lines)), default=None)
    return () if began is None else phases_beside(log.files.directory.parent, began)


def _as_wandb(tables: dict[str, Table]) -> dict[str, Any]:
    import wandb

    made = {name: wandb.Table(columns=list(it.columns), data=[list(row) for row in it.rows]) for name, it in tables.items()}
    plots = {}
    if "completion" in made:
        plots["completion_curve"] = wandb.plot.line(
            made["completion"], "seconds", "part_done", title="Part of the step's requests that is over"
        )
    if "slowest_requests" in made:
        plots["slowest_by_tokens"] = wandb.plot.scatter(
            made["slowest_requests"], "tokens", "seconds", title="The step's slowest requests"
        )
    return {f"mux_tables/{name}": it for name, it in (made | plots).items()}
