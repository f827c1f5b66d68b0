"""`verl-mux top`: what runs where now, from a run's event logs as they grow, from its coordinator, or from both.

Runs on the command line, called by cli.py; joins profiling, which reads logs, with the coordinator's answers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType

from verl_mux.coordinator import status_view
from verl_mux.coordinator.bus.client import ADDRESS_VARIABLE
from verl_mux.coordinator.commands import DEFAULT_ADDRESS, Keys, fetch_status
from verl_mux.errors import UserError
from verl_mux.profiling.live.job_states import State
from verl_mux.profiling.live.screen import REPLICA_COLUMNS, Choice, as_json, render, watch

_ANSWER_S = 3.0


def top(
    directory: Annotated[
        Path | None, typer.Argument(help="A run's directory, or one job's events; without it, a coordinator is asked.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--coordinator", "--address",
            help=f"The coordinator to ask, beside DIRECTORY or alone; without either: {ADDRESS_VARIABLE}, or {DEFAULT_ADDRESS}.",
        ),
    ] = None,
    keys: Keys = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    sort: Annotated[str, typer.Option(help=f"Column of the replicas to sort by: {', '.join(REPLICA_COLUMNS)}.")] = "job",
    only: Annotated[str, typer.Option(help="Only replicas whose job, number or node hold this text.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Print what is there now, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and end.")] = False,
) -> None:  # fmt: skip
    """Show what runs where now: requests by state, tokens a second and KV use of each replica, and which job waits for which.

    In a terminal: s sorts replicas by the next column, r turns the order round, / asks for a text to filter by, p pauses, q ends.
    """
    if sort not in REPLICA_COLUMNS:
        raise UserError(f"--sort {sort}: not a column; allowed: {', '.join(REPLICA_COLUMNS)}")
    choice = Choice(column=list(REPLICA_COLUMNS).index(sort), only=only)
    run = None if directory is None else State(directory)
    coordinator = address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS if run is None or address is not None else None
    status: dict[str, Any] = {}

    def look() -> None:
        if coordinator is not None:
            status["coordinator"] = fetch_status(coordinator, _ANSWER_S, keys)
        if run is not None:
            run.look()

    def shown() -> Group:
        of_coordinator: list[RenderableType] = [status_view.tables(seen) for seen in status.values()]
        return Group(*of_coordinator, *([] if run is None else [render(run, choice)]))

    look()
    if json:
        print(msgspec.json.encode(status | (as_json(run, choice) if run is not None else {})).decode())
    elif once or not sys.stdout.isatty():
        Console(width=None if sys.stdout.isatty() else 180).print(shown())
    else:
        watch(look, shown, choice, every)
