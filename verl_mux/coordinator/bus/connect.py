"""`connect(...)` registers a job and gives its client, a Mux, whose `phase` holds a lease for the length of a block.

    mux = connect("tcp://127.0.0.1:5570", "math", {"rollout": ["r0"], "train": ["t0"]})
    with mux.phase("rollout", step=1) as lease:
        ...  # the nodes in lease.nodes are ours

Runs in the processes of a job; called by the trainer, by `verl-mux hold` and by users (`verl_mux.phase`). With address None
every lease is granted at once, locally: no socket, no thread. All calls may come from any thread. The coordinator may be
restarted meanwhile; calls that need an answer wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from verl_mux.coordinator.bus.client import Lease, LocalMux, Mux
from verl_mux.coordinator.bus.curve_keys import JOB, for_address
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.errors import UserError
from verl_mux.placement.estimator import Observed
from verl_mux.placement.job_needs import JobNeeds

ADDRESS_VARIABLE, JOB_VARIABLE, NODES_VARIABLE = "VERL_MUX_COORDINATOR", "VERL_MUX_JOB", "VERL_MUX_NODES"

_Function = TypeVar("_Function", bound=Callable[..., Any])

_default: LocalMux | None = None
_default_lock = threading.Lock()


def connect(
    address: str | None,
    job: str,
    nodes: dict[str, list[str]],
    *,
    gpus: dict[str, int] | None = None,
    host_memory: dict[str, dict[str, int]] | None = None,
    seed: int = 0,
    steps: int | None = None,
    timeout: float = 30.0,
    uid: str | None = None,
    keys: str | None = None,
    needs: JobNeeds | None = None,
    slo: float | None = None,
    profiled: Observed | None = None,
    filler: bool = False,
    grace: float = 0.0,
    movable: bool = False,
    colocated: bool = False,
    wait: bool = True,
) -> LocalMux:
    """Registers the job, or attaches one more client to it when the uid is the same.

    Args:
        nodes: nodes or whole pools per side, {"rollout": ["r0"], "train": ["t0"]}; the same on both when colocated.
        gpus: GPUs needed on each node, by side or by node.
        host_memory: bytes of the job's states on each node of a side, by side and kind; where nodes have a limit, a job that
            does not fit is refused.
        steps: how many steps the job will run; None if unknown.
        timeout: seconds to wait for the coordinator, here and for the answer to a release.
        uid: names this start of the job, and is its secret; default: VERL_MUX_JOB_UID, or a new one.
        keys: the folder of the coordinator's keys; default: VERL_MUX_KEYS, or on this machine its user's own.
        needs: what a step computes, for a job that leaves its nodes to the coordinator ({"rollout": ["auto"], "train":
            ["auto"]}); the client's `nodes` then say where it was placed.
        slo: how many times its iteration alone an iteration of such a job may last; default: the coordinator's.
        profiled: seconds of a few steps of such a job, measured before; it is placed by them rather than by bounds.
        filler: the job ranks behind all others, see docs/hold.md. It may name one side only, asks for any number of its nodes,
            and gives a lease back as soon as its `wanted` is set.
        grace: seconds that a filler may need for that, if they are more than the coordinator's `filler_grace`.
        movable: the launcher starts the job again, from its newest checkpoint, when it has left because the coordinator asked it
            to (`Mux.move`).
        colocated: both phases of such a job run on the same nodes, for training.
        wait: block until a job that has to be placed has its nodes; if False, the client's `nodes` may be empty.

    Raises:
        UserError: the registration is refused, or no coordinator answers within `timeout` seconds.
    """
    if address is None:
        return LocalMux(job, nodes, filler)
    registration: dict[str, Any] = {
        "gpus": gpus or {}, "host_memory": host_memory or {}, "seed": seed, "steps": steps, "needs": needs, "slo": slo,
        "profiled": profiled or Observed(), "grace": grace, "movable": movable, "colocated": colocated,
    }  # fmt: skip
    return Mux(
        address, job, nodes, uid=uid or _uid_for(job), timeout=timeout, wait=wait, keys=for_address(address, keys, JOB),
        filler=filler, **registration,
    )  # fmt: skip


def default_mux() -> LocalMux:
    """The process's client, made at the first call from the environment; a local one where that names no coordinator.

    VERL_MUX_COORDINATOR is the address, VERL_MUX_JOB the name, VERL_MUX_NODES the nodes per side as JSON, VERL_MUX_KEYS the
    folder of the coordinator's keys.
    """
    global _default
    with _default_lock:
        if _default is None:
            address = os.environ.get(ADDRESS_VARIABLE) or None
            _default = connect(address, os.environ.get(JOB_VARIABLE, f"job-{os.getpid()}"), _nodes_from_environment())
        return _default


def _nodes_from_environment() -> dict[str, list[str]]:
    given = os.environ.get(NODES_VARIABLE, "{}")
    with contextlib.suppress(ValueError):
        if isinstance(nodes := json.loads(given), dict):
            return nodes
    raise UserError(f'{NODES_VARIABLE} is {given!r}; expected JSON like {{"rollout": ["r0"], "train": ["t0"]}}')


def _uid_for(job: str) -> str:
    """The uid from the environment unless it is another job's; a new one goes there, so that children carry it.

    Every process started with it in VERL_MUX_JOB_UID counts as one of the job, so each start of a job needs a new one.
    """
    new = f"{job}:{uuid.uuid4().hex}"
    uid = os.environ.setdefault(UID_VARIABLE, new)
    another_job = ":" in uid and uid.rpartition(":")[0] != job
    return new if another_job else uid


class phase(contextlib.ContextDecorator):
    """A lease of the process's default client around a block or around each call of a function, plain or async."""

    def __init__(self, name: str, step: int | None = None, nodes: list[str] | None = None):
        self._arguments = (name, step, nodes)

    def __enter__(self) -> Lease:
        self._holding = default_mux().phase(*self._arguments)
        return self._holding.__enter__()

    def __exit__(self, *error) -> bool | None:
        return self._holding.__exit__(*error)

    def _recreate_cm(self) -> phase:
        return phase(*self._arguments)

    def __call__(self, function: _Function) -> _Function:
        return self._around_async(function) if inspect.iscoroutinefunction(function) else super().__call__(function)

    def _around_async(self, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        async def leased(*args, **kwargs):
            holding = self._recreate_cm()
            await asyncio.to_thread(holding.__enter__)  # the wait for the lease must not stop the loop
            with contextlib.ExitStack() as stack:
                stack.push(holding.__exit__)
                return await function(*args, **kwargs)

        return leased
