"""`verl-mux evict` and `verl-mux release`, which take nodes away from jobs, so they ask twice. Run by an operator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.access.keys import OPERATOR, for_address
from verl_mux.coordinator.bus.link import ask
from verl_mux.coordinator.command import DEFAULT_ADDRESS, Address, Keys, check_timeout
from verl_mux.errors import UserError

_Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
_Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]


def evict(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    yes: _Yes = False,
    timeout: _Timeout = 3.0,
) -> None:
    """End a job as if it had failed; its nodes are given on when its processes are gone."""
    _confirm(f"End job {job!r}? What it has not saved is lost.", job, yes)
    _say(m.Evict(job=job), coordinator, timeout, keys)


def release(
    name: Annotated[str, typer.Argument(help="A job that is ending, or a node or host of one.")],
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    yes: _Yes = False,
    timeout: _Timeout = 3.0,
) -> None:
    """Free what an ending job holds on hosts that the coordinator cannot see. Look there first: is none of its processes left?"""
    _confirm(f"Is nothing of it left on the hosts of {name!r}? Others get its nodes at once.", name, yes)
    _say(m.Free(name=name), coordinator, timeout, keys)


def _confirm(question: str, name: str, yes: bool) -> None:
    """Once for yes or no, once more for the name."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError("this is asked twice on a terminal, and here is none: give --yes")
    if not typer.confirm(question) or typer.prompt("Its name once more") != name:
        raise UserError("nothing was done")


def _say(message: m.ByHand, address: str, timeout: float, keys: Path | None) -> None:
    check_timeout(timeout)
    answer = ask(address, message, timeout, for_address(address, keys, OPERATOR))
    if answer is None:
        raise UserError(f"no coordinator answers at {address} (waited {timeout:g} s)")
    if not isinstance(answer, m.Done):
        raise UserError(f"the coordinator at {address} refuses: {getattr(answer, 'reason', answer)}")
    print(answer.text)
