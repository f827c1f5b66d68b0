"""`verl-mux agent`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from verl_mux.agent.devices import open_devices
from verl_mux.agent.loop import Agent
from verl_mux.coordinator.bus.curve_keys import AGENT, for_address
from verl_mux.coordinator.bus.members import HOST, UID_VARIABLE
from verl_mux.coordinator.commands import DEFAULT_ADDRESS, Address, Keys, make_log_folder
from verl_mux.profiling.eventlog.log import NULL_LOG, EventLog


def agent(
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for its log: who held which memory here, and when.")] = None,
    devices: Annotated[
        str, typer.Option(help="Who says what device memory processes hold: auto, nvml, ledger (no device) or none.")
    ] = "auto",
) -> None:
    """Look at this host for a coordinator, and end what outlives its job, until interrupted."""
    opened = open_devices(devices)
    if log_dir is not None:
        make_log_folder(log_dir / HOST)
    _take_off_the_mark()
    event_log = EventLog(log_dir / HOST, role="agent", job="agent") if log_dir is not None else NULL_LOG
    enough = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: enough.set())
    print(f"verl-mux agent of {HOST} for {coordinator}; device memory: {opened.source}", file=sys.stderr, flush=True)
    try:
        Agent(coordinator, for_address(coordinator, keys, AGENT), opened, event_log).run(enough)
    finally:
        event_log.close()


def _take_off_the_mark() -> None:
    """Started by a job, it would count as a process of that job: what a process was started with, only a new start changes."""
    if os.environ.pop(UID_VARIABLE, None) is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(os.environ))
