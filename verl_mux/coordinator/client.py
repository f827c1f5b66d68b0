"""How a job asks for its turn: `connect(...)` gives a Mux, whose `phase` holds a lease for the length of a block.

    mux = connect("tcp://127.0.0.1:5570", "math", {"rollout": ["r0"], "train": ["t0"]})
    with mux.phase("rollout", step=1) as lease:
        ...  # the nodes in lease.nodes are ours

With address None every lease is granted at once, locally: no socket, no thread. All calls may come from any thread.
The coordinator may be restarted meanwhile; calls that need an answer wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable

from verl_mux.coordinator import messages as m
from verl_mux.coordinator.conversation import Conversation, release_key
from verl_mux.coordinator.local import Lease, LeaseLost, LocalMux
from verl_mux.coordinator.members import UID_VARIABLE
from verl_mux.errors import UserError
from verl_mux.scheduling.job_needs import JobNeeds

__all__ = ["Lease", "LeaseLost", "LocalMux", "Mux", "connect", "default_mux", "new_uid", "phase"]

log = logging.getLogger(__name__)

ADDRESS_VARIABLE, JOB_VARIABLE, NODES_VARIABLE = "VERL_MUX_COORDINATOR", "VERL_MUX_JOB", "VERL_MUX_NODES"
_PROGRESS_INTERVAL_S = 0.05


class Mux(LocalMux):
    """A job registered with the coordinator at `address`. What the calls mean is said in LocalMux."""

    def __init__(self, address: str, job: str, nodes: dict[str, list[str]], *, uid: str, timeout: float, **needs):
        super().__init__(job, nodes)
        self.address, self.uid = address, uid
        self._timeout = timeout
        self._progress_sent = 0.0
        self._conversation = Conversation(address, job, uid)
        try:
            self._conversation.introduce(timeout, nodes=nodes, **needs)
        except BaseException:
            self._conversation.abandon()
            raise
        answer = self._conversation.registered
        self.nodes = answer.nodes if answer is not None else {}

    def acquire(self, phase: str, step: int = 0, nodes: list[str] | None = None) -> Lease:
        step, nodes = int(step), self._nodes_for(phase, step, nodes)
        key, asked = uuid.uuid4().hex, time.perf_counter()
        request = m.LeaseRequest(**self._conversation.who, key=key, phase=phase, step=step, nodes=nodes)
        try:
            answer = self._conversation.ask(key, request)
        except BaseException:
            self._conversation.cancel(key)
            raise
        if isinstance(answer, m.Refused):
            raise UserError(answer.reason)
        waited = time.perf_counter() - asked
        return Lease(answer.token, answer.nodes, answer.phase, answer.step, waited, answer.granted_at)

    def release(self, lease: Lease) -> None:
        if not self._conversation.let_go(lease.token):
            return
        question = m.LeaseRelease(**self._conversation.who, token=lease.token)
        answer = self._conversation.ask(release_key(lease.token), question, self._timeout)
        if isinstance(answer, m.LeaseLost):
            raise LeaseLost(answer.reason)
        if answer is None:
            log.warning("coordinator %s does not answer; the release of %s will be repeated", self.address, lease)

    def shrink(self, lease: Lease, nodes: list[str]) -> Lease:
        smaller = super().shrink(lease, nodes)
        self._conversation.shrink(lease.token, smaller.nodes)
        self._conversation.tell(m.LeaseShrink(**self._conversation.who, token=lease.token, nodes=list(nodes)))
        return smaller

    def progress(self, done: int, total: int) -> None:
        done, total = int(done), int(total)  # often numpy's, which do not travel
        token = self._conversation.token_of("rollout")
        now = time.monotonic()
        # At most 20 a second travel, so that it may be called for every sample; the last one always does.
        if done >= total or now - self._progress_sent >= _PROGRESS_INTERVAL_S:
            self._progress_sent = now
            self._conversation.tell(m.Progress(**self._conversation.who, done=done, total=total, token=token))

    def report_step(self, step: int, metrics: dict[str, float]) -> None:
        plain = {name: float(value) for name, value in metrics.items()}
        self._conversation.tell(m.StepReport(**self._conversation.who, step=int(step), metrics=plain))

    def memory(self, node: str, tags: dict[str, int]) -> None:
        plain = {tag: int(num_bytes) for tag, num_bytes in tags.items()}
        self._conversation.tell(m.MemoryReport(**self._conversation.who, node=node, tags=plain))

    def note(self, note: str) -> None:
        self._conversation.tell(m.PhaseNote(**self._conversation.who, note=note))

    def members(self, members: Iterable[tuple[str, int, float]]) -> None:
        self._conversation.members = [m.Member(*member) for member in members]
        self._conversation.tell(m.MemberReport(**self._conversation.who, members=self._conversation.members))

    def contended(self, phase: str) -> list[str]:
        contended = self._conversation.contended
        return [node for node in contended if node in self.nodes.get(phase, contended)]

    def cpus(self, node: str) -> list[int] | None:
        return self._conversation.registered.cpus.get(node)

    def fail(self, reason: str) -> None:
        self._conversation.fail(reason)

    def close(self) -> None:
        self._conversation.close()


def new_uid(job: str) -> str:
    """A uid for one start of `job`. Whoever starts it may put it into its environment as VERL_MUX_JOB_UID.

    Everything started with it there counts as a process of the job, so a restart needs a new one.
    """
    return f"{job}:{uuid.uuid4().hex}"


def _uid_for(job: str) -> str:
    """The uid from the environment unless it is another job's; a new one goes there, so that children carry it."""
    uid = os.environ.setdefault(UID_VARIABLE, new_uid(job))
    another_job = ":" in uid and uid.rpartition(":")[0] != job
    return new_uid(job) if another_job else uid


_default: LocalMux | None = None
_default_lock = threading.Lock()


def connect(
    address: str | None,
    job: str,
    nodes: dict[str, list[str]],
    *,
    gpus: dict[str, int] | None = None,
    seed: int = 0,
    steps: int | None = None,
    timeout: float = 30.0,
    uid: str | None = None,
    default: bool = False,
    needs: JobNeeds | None = None,
    slo: float | None = None,
    wait: bool = True,
) -> LocalMux:
    """Registers the job, or attaches one more client to it when the uid is the same.

    Args:
        nodes: nodes or whole pools per side, {"rollout": ["r0"], "train": ["t0"]}; the same on both when colocated.
        gpus: GPUs needed on each node, by side or by node.
        steps: how many steps the job will run; None if unknown.
        timeout: seconds to wait for the coordinator, here and for the answer to a release.
        uid: names this start of the job; default: VERL_MUX_JOB_UID, or a new one.
        default: let the module's `phase` use this client too.
        needs: what a step computes, for a job that leaves its nodes to the coordinator ({"rollout": ["auto"], "train":
            ["auto"]}); the client's `nodes` then say where it was placed.
        slo: how many times its iteration alone an iteration of such a job may last; default: the coordinator's.
        wait: block until such a job is placed; if False and it has to wait, the client's `nodes` are empty.

    Raises:
        UserError: the registration is refused, or nobody answers within `timeout` seconds.
    """
    global _default
    if address is None:
        mux = LocalMux(job, nodes)
    else:
        registration = {"gpus": gpus or {}, "seed": seed, "steps": steps, "needs": needs, "slo": slo}
        mux = Mux(address, job, nodes, uid=uid or _uid_for(job), timeout=timeout, wait=wait, **registration)
    if default:
        _default = mux
    return mux


def default_mux() -> LocalMux:
    """The client made with `default=True`, else one made from the environment, else a local one.

    VERL_MUX_COORDINATOR is the address, VERL_MUX_JOB the name, VERL_MUX_NODES the nodes per side as JSON.
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

    def __call__(self, function: Callable) -> Callable:
        return self._around_async(function) if inspect.iscoroutinefunction(function) else super().__call__(function)

    def _around_async(self, function: Callable) -> Callable:
        @functools.wraps(function)
        async def leased(*args, **kwargs):
            holding = self._recreate_cm()
            await asyncio.to_thread(holding.__enter__)  # the wait for the lease must not stop the loop
            with contextlib.ExitStack() as stack:
                stack.push(holding.__exit__)
                return await function(*args, **kwargs)

        return leased
