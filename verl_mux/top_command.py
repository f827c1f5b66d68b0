"""`verl-mux top`: what runs where now, from a run's event logs as they grow, from its coordinator, or from both.

Runs on the command line, called by cli.py; joins profiling, which reads logs, with the coordinator's answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
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
from verl_mux.profiling.live.screen import METRICS, REPLICA_COLUMNS, Choice, Order, Sample, as_json, render, samples, watch

_ANSWER_S = 3.0
_NO_METRICS = (
    "--metrics-port serves the figures of a run while it goes on: it needs DIRECTORY, and goes with neither --once nor --json; "
    "a coordinator serves its own (verl-mux coordinator --metrics-port)"
)


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
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve the run's figures for Prometheus at /metrics of this port; 0: a free one.")
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="The address for /metrics; 0.0.0.0: all interfaces.")] = "127.0.0.1",
) -> None:  # fmt: skip
    """Show what runs where now: requests by state, tokens a second and KV use of each replica, and which job waits for which.

    In a terminal: s sorts by the next column, r turns the order round, / asks for a text to filter by, Tab turns these keys to
    the other table, p pauses, q ends. Elsewhere it serves /metrics until Ctrl-C or SIGTERM, where a port for that is given.
    """
    if metrics_port is not None and (directory is None or once or json):
        raise UserError(_NO_METRICS)
    if sort not in REPLICA_COLUMNS:
        raise UserError(f"--sort {sort}: not a column; allowed: {', '.join(REPLICA_COLUMNS)}")
    if metrics_port is not None and not sys.stdout.isatty():
        with _metrics_of(directory, metrics_port, metrics_host):
            return _until_stopped()
    choice = Choice(replicas=Order(column=list(REPLICA_COLUMNS).index(sort), only=only))
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
        with _metrics_of(directory, metrics_port, metrics_host):
            watch(look, shown, choice, every)


@contextlib.contextmanager
def _metrics_of(directory: Path | None, port: int | None, host: str) -> Iterator[None]:
    """Serve the run's figures for Prometheus meanwhile, unless port is None. Raises UserError for a port in use.

    Each scrape reads the logs itself: what the screen shows may be paused.
    """
    if directory is None or port is None:
        yield
        return
    from verl_mux.coordinator.prometheus import Figures, serve_metrics

    run, one_at_a_time = State(directory), threading.Lock()
    run.look()  # the first look takes longest, and a scrape must not wait for it

    def newest() -> list[Sample]:
        with one_at_a_time:
            run.look()
            return list(samples(run, time.time()))

    with serve_metrics(Figures(METRICS, newest), port, host):
        yield


def _until_stopped() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    enough = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: enough.set())
    enough.wait()
