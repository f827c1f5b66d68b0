"""What strangers can do to a coordinator: malformed frames and well-typed nonsense, while good clients take turns.

The strangers know the protocol, the names of jobs, and nodes that no good client uses; what they may not know is a job's uid,
which is a secret. Beside those that send nonsense there are one that asks for the status and never reads an answer, two that
connect under one name and take it from each other all the time, and one message in ten is one that was sent before. A stranger
with a key that asks for a good client's nodes is a job like any other: only keys keep it out. Runs
on the command line; starts a coordinator and an attacker.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Annotated, Any

import msgspec
import typer
import zmq

from bench.coordinator_process import CoordinatorProcess
from bench.crowd import Crowd
from bench.load import grants
from bench.measuring import AsJson, child, show
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.curve_keys import JOB, for_address
from verl_mux.coordinator.bus.link import connect_to, dealer
from verl_mux.coordinator.bus.members import this_process
from verl_mux.coordinator.commands import fetch_status

_NODES = ["r0", "r1", "r2", "r3"]
_DECOYS = ["x0", "x1"]
_ME = this_process()
# Sent without waiting for answers; more would be dropped where a queue is full, and prove nothing.
_WINDOW = 50
_REPLAYED = 0.1  # of all messages
_KINDS: list[type[m.Message]] = [*m.AnyFromJob.__args__, m.JobOver, m.Unknown, m.LearnerStateUpdate]

# In words: what a value looks like is read off its type's name.
_FIELDS = {kind: {field.encode_name: str(field.type) for field in msgspec.structs.fields(kind)} for kind in _KINDS}


def bench_hostile(
    frames: Annotated[int, typer.Option(help="Malformed frames.", min=0)] = 100_000,
    messages: Annotated[int, typer.Option(help="Well-typed hostile messages.", min=0)] = 100_000,
    rate: Annotated[float, typer.Option(help="Hostile messages a second while grants are timed.", min=1)] = 2000.0,
    seconds: Annotated[float, typer.Option(help="How long grants are timed.", min=1)] = 20.0,
    seed: Annotated[int, typer.Option(help="Of what is sent.")] = 0,
    json: AsJson = False,
) -> None:
    """Attack a coordinator process of its own, and time what its good clients notice."""
    show(hostile(frames, messages, rate, seconds, seed), json)


def hostile(frames: int, messages: int, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Grants are timed while `rate` a second of both kinds arrive; the rest follows as fast as it is answered."""
    pools = {"rollout": _NODES, "decoys": _DECOYS}
    config = {"pools": {pool: {"nodes": [{"name": name} for name in names]} for pool, names in pools.items()}}
    with CoordinatorProcess(config) as coordinator:
        crowd = Crowd(coordinator.address, _NODES)
        crowd.register()
        crowd.run(min(3.0, seconds), 10.0)
        alone = grants(crowd)["grant_p99_ms"]
        grown_from = coordinator.rss_mib
        paced = min(int(rate * seconds), frames + messages)
        _attack(coordinator, crowd, [paced - paced // 2, paced // 2], rate, seed)
        found = grants(crowd)
        began = time.monotonic()
        rest = [max(0, frames - (paced - paced // 2)), max(0, messages - paced // 2)]
        _attack(coordinator, crowd, rest, None, seed + 1)
        flood_s = time.monotonic() - began
        refused = fetch_status(coordinator.address, 30.0)["refused"] if coordinator.alive else {}
        grown = coordinator.rss_mib - grown_from if coordinator.alive else float("nan")
        crowd.close()
        return {
            "frames": frames, "messages": messages, "exits": int(not coordinator.alive), "grown_bytes": round(grown * 2**20),
            "grant_p99_ms": found["grant_p99_ms"], "grants": found["grants"], "grant_p99_ms_without": alone,
            "hostile_per_second": rate, "flood_per_second": round(sum(rest) / flood_s), "refused": refused,
        }  # fmt: skip


def _attack(coordinator: CoordinatorProcess, crowd: Crowd, counts: list[int], rate: float | None, seed: int) -> None:
    """From a process of its own, while the crowd goes on taking turns."""
    crowd.grants_s.clear()
    with child(_attacker, coordinator.address, counts, rate, seed) as attacker:
        while not attacker.poll() and coordinator.alive:
            crowd.run(1.0, 20.0)


def _attacker(address: str, counts: list[int], rate: float | None, seed: int, bench: Connection) -> None:
    chance = random.Random(seed)
    context = zmq.Context()
    sockets = [_stranger(context, address, number) for number in range(8)]
    deaf, *twins = (_stranger(context, address, number) for number in ("deaf", "twin", "twin"))
    for socket in (deaf, *twins):
        socket.setsockopt(zmq.SNDTIMEO, 0)
    status, before = m.encode(m.StatusRequest()), deque[bytes](maxlen=_WINDOW)
    plan = [0] * counts[0] + [1] * counts[1]
    chance.shuffle(plan)
    began = time.monotonic()
    for number, well_typed in enumerate(plan):
        if rate is not None:
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
        which = chance.randrange(len(sockets))
        socket = sockets[which]
        made = _message if well_typed else _malformed
        frame = chance.choice(before) if before and chance.random() < _REPLAYED else made(chance, f"s{which}")
        before.append(frame)
        socket.send(frame)
        for other in (deaf, chance.choice(twins)):
            with contextlib.suppress(zmq.Again):
                other.send(status)
        while socket.poll(0):
            socket.recv()
        if number % _WINDOW == 0 and rate is None:
            _catch_up(socket)
    for socket in sockets:
        _catch_up(socket)
    bench.send(None)


def _stranger(context: zmq.Context, address: str, number: int | str) -> zmq.Socket:
    socket = dealer(context, f"s{number}", for_address(address, None, JOB))
    socket.setsockopt(zmq.SNDTIMEO, 10_000)
    connect_to(address, socket)
    return socket


def _catch_up(socket: zmq.Socket) -> None:
    """Waits until all that was sent before was taken: its own question comes back last."""
    socket.send(msgspec.msgpack.encode({"type": "HEARTBEAT", "version": m.VERSION, "key": "caught up"}))
    while socket.poll(10_000) and b"caught up" not in socket.recv():
        pass


def _malformed(chance: random.Random, client: str) -> bytes:
    kind = chance.randrange(4)
    if kind == 0:
        return chance.randbytes(chance.randint(0, 60))
    if kind == 1:
        mutated = bytearray(_message(chance, client))
        for _ in range(chance.randint(1, 4)):
            mutated[chance.randrange(len(mutated))] = chance.randrange(256)
        return bytes(mutated)
    if kind == 2:
        return b"\x81\xa4type" + b"\x91" * chance.randint(1, 3000) + b"\x90"
    return b"\x81\xa4type" + chance.choice([b"\xdb", b"\xdd", b"\xc6"]) + chance.randbytes(4) + chance.randbytes(20)


def _message(chance: random.Random, client: str) -> bytes:
    kind = chance.choice(_KINDS)
    fields = {name: _value(chance, of, name, client) for name, of in _FIELDS[kind].items()}
    return msgspec.msgpack.encode({**fields, "type": kind.__struct_config__.tag, "version": m.VERSION})


def _value(chance: random.Random, of: str, name: str, client: str) -> Any:
    """Half the time what may well be accepted, else anything of the type."""
    known: dict[str, Any] = {
        **{"job": chance.choice(["job0", "job1", *(f"stranger{i}" for i in range(20))]), "uid": "stranger", "client": client},
        **{"nodes": {"rollout": [chance.choice(_DECOYS)]}, "node": chance.choice(_DECOYS), "phase": "rollout", "step": 1},
        **{"key": str(chance.randrange(50)), "token": chance.randrange(50), "host": _ME.host, "members": []},
        **{"pid": _ME.pid, "started": _ME.started, "boot": _ME.boot, "held": [], "again": False},
        **{"needs": None, "slo": None, "gpus": {}, "placed": {}, "tags": {"weights": chance.randrange(99)}},
    }
    if name in known and chance.random() < 0.9:
        return [chance.choice(_DECOYS)] if name == "nodes" and "dict[" not in of else known[name]
    return _anything(chance, of)


def _anything(chance: random.Random, of: str) -> Any:
    if "dict[" in of:
        return {_text(chance): chance.choice([[_text(chance)], chance.randrange(-5, 2**40)]) for _ in range(chance.randint(0, 3))}
    if "list[" in of:
        return [_text(chance) for _ in range(chance.randint(0, 5))]
    if "float" in of:
        return chance.choice([0.0, -1.0, 1e300, float("nan"), float("inf"), chance.random()])
    if "bool" in of:
        return chance.random() < 0.5
    if "int" in of:
        return chance.choice([0, -1, 1, 2**31, 2**53, 2**63, 2**64 - 1, chance.randrange(2**40)])
    return _text(chance)


def _text(chance: random.Random) -> str:
    return chance.choice(["", "r0", "x0", "job0", "a" * 300, "\x1b[2J", "\u2603" * 10, str(chance.random())])
