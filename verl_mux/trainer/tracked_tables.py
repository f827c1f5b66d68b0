"""A step's tables on their way to wandb, through verl's Tracking: the one of its trackers that takes tables and plots."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from verl_mux.profiling.plain.lines import Line
from verl_mux.profiling.plain.step_tables import Table, step_tables

WANDB = "wandb"

logger = logging.getLogger(__name__)


def log_tables(tracking: Any, lines: Iterable[Line], step: int, every: int) -> None:
    """`mux_tables/*` of a step to wandb, where verl's Tracking has it and the step is a multiple of `every`; 0: never.

    What goes wrong is a warning: tables must not stop training.
    """
    if not every or step % every or WANDB not in tracking.logger:
        return
    try:
        tracking.log(_made(step_tables(lines)), step, backend=[WANDB])
    except Exception as error:  # whatever a tracker raises
        logger.warning("step %d: its tables did not reach wandb: %s: %s", step, type(error).__name__, error)


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
