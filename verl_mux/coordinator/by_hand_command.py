"""`verl-mux evict`, `release` and `drain`, which take nodes away from jobs, so they are asked twice; and `reload`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.access.keys import OPERATOR, for_address
from verl_mux.coordinator.bus.limits import MOST_USD
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


def budget(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    usd: Annotated[float, typer.Argument(help="What it may cost in all.")],
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    timeout: _Timeout = 3.0,
) -> None:
    """Let a job cost so much in all; one whose budget was spent goes on."""
    if not 0 <= usd <= MOST_USD:
        raise UserError(f"a budget of {usd:g} USD was given; 0 to {MOST_USD:g} are allowed")
    _say(m.SetBudget(job=job, usd=usd), coordinator, timeout, keys)


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


def drain(
    node: Annotated[str, typer.Argument(help="The node's name.")],
    undo: Annotated[bool, typer.Option("--undo", help="Give it to who asks again.")] = False,
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    yes: _Yes = False,
    timeout: _Timeout = 3.0,
) -> None:
    """Give a node to nobody any more; who holds it keeps it to the end of the phase."""
    if not undo:
        _confirm(f"Give node {node!r} to nobody any more? Jobs that need it wait until this is undone.", node, yes)
    _say(m.Drain(node=node, undo=undo), coordinator, timeout, keys)


def node_add(
    name: Annotated[str, typer.Argument(help="The node's name, by which jobs and Ray's resource `mux_NAME` call it.")],
    pool: Annotated[str, typer.Option(help="The pool that it comes to, whose first node it is like.")],
    host: Annotated[str | None, typer.Option(help="Name or address of its machine.")] = None,
    gpu_ids: Annotated[str | None, typer.Option(help="Which GPUs of that machine it is, as 0,1,2; default: all.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="It may vanish: for jobs that somebody starts again.")] = False,
    usd_per_hour: Annotated[float | None, typer.Option(help="Its price, if it is another than that of the pool's first.")] = None,
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    timeout: _Timeout = 3.0,
) -> None:
    """Bring a node to a pool of a running coordinator."""
    if usd_per_hour is not None and not 0 <= usd_per_hour <= MOST_USD:
        raise UserError(f"--usd-per-hour is {usd_per_hour:g}; a price from 0 to {MOST_USD:g} is needed")
    node = m.NodeAdd(pool=pool, node=name, host=host, gpu_ids=_gpu_ids(gpu_ids), spot=spot, usd_per_hour=usd_per_hour)
    _say(node, coordinator, timeout, keys)


def node_remove(
    name: Annotated[str, typer.Argument(help="The node's name.")],
    if_idle: Annotated[bool, typer.Option("--if-idle", help="Only if no job needs it now.")] = False,
    gone: Annotated[bool, typer.Option("--gone", help="Its host is no more: jobs on it end as if they had failed.")] = False,
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    yes: _Yes = False,
    timeout: _Timeout = 3.0,
) -> None:
    """Take a node out of its pool as soon as no job needs it; nobody new gets it meanwhile."""
    if gone:
        _confirm(f"Is the host of node {name!r} no more? Jobs on it end, and what they have not saved is lost.", name, yes)
    _say(m.NodeRemove(node=name, if_idle=if_idle, gone=gone), coordinator, timeout, keys)


def _gpu_ids(given: str | None) -> list[int] | None:
    if given is None:
        return None
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UserError(f"--gpu-ids is {given!r}; numbers from 0 with commas between them are needed, as 0,1,2")
    return [int(part) for part in parts]


def reload(coordinator: Address = DEFAULT_ADDRESS, keys: Keys = None, timeout: _Timeout = 3.0) -> None:
    """Have the coordinator read the pools in its file again."""
    _say(m.Reload(), coordinator, timeout, keys)


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
