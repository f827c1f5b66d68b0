"""`verl-mux bench scheduler --live`: placement through the running coordinator and its bus, among many placed jobs.

The coordinator is a process of its own with a journal, as users start it. The jobs that are there registered over the bus and
then say nothing, so that what is timed is placement and not their heartbeats (`bench load` times those). Meanwhile two other jobs
hand a node of their own to and fro, from a third process: what a placement in the making does to leases shows there. Called by
scheduler.py.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq

from bench.coordinator_process import CoordinatorProcess
from bench.leases import hand_overs
from bench.measuring import child, quantile
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.curve_keys import JOB, for_address
from verl_mux.coordinator.bus.link import connect_to, dealer
from verl_mux.coordinator.bus.members import this_process
from verl_mux.errors import Failure
from verl_mux.placement.estimator import JobNeeds, ModelSize

# Beside the two that hand a node over; a job that has departed stays on record for a while.
MOST_JOBS = m.JOBS - 2
_AUTO = {"rollout": [m.AUTO], "train": [m.AUTO]}
_ANSWER_MS = 120_000
# Qwen2.5-7B, -14B and -32B, from their configs: hidden size, layers, intermediate size, heads; all have 8 (7B: 4) heads of keys.
_MODELS = {7: (3584, 28, 18944, 28, 4), 14: (5120, 48, 13824, 40, 8), 32: (5120, 64, 27648, 40, 8)}
_NODES = {7: 1, 14: 1, 32: 2}


def live_latency(jobs: int, decisions: int, seed: int) -> dict[str, Any]:
    """Milliseconds. register: from REGISTER to the answer that names the nodes. depart: from DEREGISTER to the answer to a
    REGISTER sent right after it, which is placed only when the departure is dealt with. grant: from a release to the grant at the
    job that waits."""
    with CoordinatorProcess(_config(jobs + decisions)) as coordinator, _Bus(coordinator.address) as bus:
        rng = random.Random(seed)
        there = [bus.register(f"job{number}", rng)[0] for number in range(jobs)]
        with _grants(coordinator.address) as grants_s:
            registered, departed = [], []
            for number in range(decisions):
                name, taken_s = bus.register(f"new{number}", rng)
                registered.append(taken_s)
                there.append(name)
                began = time.perf_counter()
                bus.leave(there.pop(rng.randrange(len(there))))
                there.append(bus.register(f"next{number}", rng)[0])
                departed.append(time.perf_counter() - began)
                bus.leave(there.pop(rng.randrange(len(there))))
    return {
        "jobs": jobs,
        **{f"register_p{at}_ms": _quantile_ms(registered, at) for at in (50, 99)},
        **{f"depart_p{at}_ms": _quantile_ms(departed, at) for at in (50, 99)},
        "grant_p99_ms": _quantile_ms(grants_s, 99),
    }


def _quantile_ms(seconds: list[float], at: int) -> float:
    return round(quantile(seconds, at / 100) * 1000, 3)


def _config(jobs: int) -> dict[str, Any]:
    """Nodes for twice as many as every job alone would need; and one for the lease bench alone."""
    sides = {side: {"kind": kind, "nodes": [{"name": f"{side[0]}{i}", "gpus": 8} for i in range(2 * jobs + 8)]}
             for side, kind in (("rollout", "H20"), ("train", "H800"))}  # fmt: skip
    apart = {"apart": {"nodes": [{"name": "x0"}]}}
    return {"pools": {**sides, **apart}, "placement": "scheduler", "lease_timeout": 3600}


class _Bus:
    """One socket for each job, as jobs have; it is closed once the job has its answer."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._keys = for_address(address, None, JOB)
        self._context = zmq.Context()
        self._about = msgspec.structs.asdict(this_process())

    def __enter__(self) -> _Bus:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def register(self, name: str, rng: random.Random) -> tuple[str, float]:
        """(name, seconds until it has its nodes)."""
        asked = m.Register(**_who(name), **self._about, nodes=_AUTO, needs=_needs(rng), slo=rng.uniform(1, 2))
        return name, self._say(name, asked, m.Registered)

    def leave(self, name: str) -> None:
        self._say(name, m.Deregister(**_who(name), reason="done"), m.JobEnded)

    def _say(self, name: str, message: m.FromJob, until: type[m.Message]) -> float:
        socket = dealer(self._context, f"{name}-1", self._keys, immediate=True)
        try:
            connect_to(self._address, socket)
            if not socket.poll(_ANSWER_MS, zmq.POLLOUT):
                raise Failure(f"no coordinator answers at {self._address}")
            began = time.perf_counter()
            socket.send(m.encode(message))
            while socket.poll(_ANSWER_MS):
                answer = m.decode(socket.recv())
                if isinstance(answer, until):
                    return time.perf_counter() - began
                if isinstance(answer, m.Refused):
                    raise Failure(answer.reason)
            raise Failure(f"{type(message).__name__} of {name} was not answered within {_ANSWER_MS} ms")
        finally:
            socket.close(linger=0)


def _who(name: str) -> dict[str, Any]:
    return {"job": name, "uid": f"{name}:bench", "client": f"{name}-1"}


def _needs(rng: random.Random) -> JobNeeds:
    billions = rng.choice(list(_MODELS))
    hidden, layers, intermediate, heads, kv_heads = _MODELS[billions]
    nodes = _NODES[billions]
    model = ModelSize(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=intermediate, vocab_size=152064,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128,
    )  # fmt: skip
    return JobNeeds(
        model=model, responses=rng.choice((128, 256, 512)), prompt_tokens=1024, response_tokens=rng.choice((4096, 8192, 16384)),
        rollout_nodes=nodes, rollout_gpus=8, train_nodes=nodes, train_gpus=8, replica_gpus=2,
    )  # fmt: skip


@contextlib.contextmanager
def _grants(address: str) -> Iterator[list[float]]:
    """Filled when left: seconds of all hand-overs in the meantime."""
    found: list[float] = []
    try:
        with child(_hand_over, address) as hands:
            _next(hands)  # the first hand-over is done
            yield found
            hands.send("enough")
            found += _next(hands)
    except (EOFError, BrokenPipeError):
        raise Failure("the jobs that hand a node over ended") from None


def _next(connection: Connection) -> Any:
    if not connection.poll(_ANSWER_MS / 1000):
        raise Failure(f"the jobs that hand a node over have said nothing for {_ANSWER_MS} ms")
    return connection.recv()


def _hand_over(address: str, bench: Connection) -> None:
    """Two jobs, one node, until the bench ends; once at least."""
    taken = []
    for seconds in hand_overs(address, "x0"):
        taken.append(seconds)
        if len(taken) == 1:
            bench.send("begun")
        if bench.poll(0.01):
            break
    bench.send(taken)
