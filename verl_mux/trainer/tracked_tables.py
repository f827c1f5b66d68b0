"""A step's tables on their way to wandb, through verl's Tracking: the one of its trackers that takes tables and plots."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from verl_mux.profiling.plain.lines import Line, phases_beside
from verl_mux.profiling.plain.step_metrics import Table, step_tables, waits_for_leases

WANDB = "wandb"

logger = logging.getLogger(__name__)


def log_tables(tracking: Any, log: Any, lines: list[Line], step: int, every: int) -> None:
    """`mux_tables/*` of a step to wandb, where verl's Tracking has it and the step is a multiple of `every`; 0: never.

    log: the trainer's event log, among whose files `lines` lie. What goes wrong is a warning: tables must not stop training.
    """
    if not every or step % every or WANDB not in tracking.logger:
        return
    try:
        tracking.log(_made(step_tables(lines, _beside(log, lines))), step, backend=[WANDB])
    except Exception as error:  # whatever a tracker raises
        logger.warning("step %d: its tables did not reach wandb: %s: %s", step, type(error).__name__, error)


def _beside(log: Any, lines: list[Line]) -> Iterable[Line]:
    began = min((line.end - line.seconds for line in waits_for_leases(lines)), default=None)
    return () if began is None else phases_beside(log.files.directory.parent, began)


def _made(tables: dict[str, Table]) -> dict[str, Any]:
    import wandb

    made = {
        name: wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows]) for name, table in tables.items()
    }
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
