"""The same ends over loopback, as fast as this machine lets them, beside plain sockets that move as many bytes the same ways.

Called by sync_bench.py; starts the processes of both.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from typing import Any

import psutil

from bench.measuring import child
from bench.sync.group import Group
from bench.sync.participant import digest_of, entries_of
from verl_mux.errors import Failure, UserError

_SENDERS, _HOSTS, _WORKERS = 2, 2, 2
_SETTINGS = {"piece_bytes": 4 << 20, "streams": 1, "timeout_s": 60.0}
_ROUNDS = 3


def over_loopback(model_bytes: int) -> dict[str, Any]:
    """GB/s that arrive on all hosts together, of a sync and of plain sockets beside it, the best of three each, in turns; CPU
    seconds per GiB that was sent or received by one process; bytes that a host's processes had beyond the region.

    Raises:
        UserError: there is not enough memory.
    """
    # Each rank's part, the region of each host, and the plain sockets' memory of the same size.
    needed = model_bytes * (1 + _HOSTS) + (1 << 30)
    if (free := psutil.virtual_memory().available) < needed:
        raise UserError(f"{model_bytes} bytes over loopback need {needed} bytes of memory, and {free} are free")
    trainers: list[tuple] = [([], "trainers", "127.0.0.1")] * _SENDERS
    workers: list[tuple] = [([], f"host{at}", "127.0.0.1") for at in range(_HOSTS) for _ in range(_WORKERS)]
    found = []
    with Group.of(trainers, workers, model_bytes, [1 / _SENDERS] * _SENDERS, _SETTINGS) as group:
        for _ in range(_ROUNDS):
            found.append(group.raw_sync("two_stage", 1))
    plain = [plain_sockets(model_bytes) for _ in range(_ROUNDS)]
    answers, seconds = min(found, key=lambda it: it[1])
    moved, gib = model_bytes * _HOSTS / 1e9, model_bytes / 2**30
    send = sum(it["cpu"] for it in answers[:_SENDERS]) / (gib * _HOSTS)
    receive = [it for it in answers[_SENDERS:] if "received_bytes" in it]
    wanted = digest_of(entries_of(model_bytes), 1)
    return {
        "model_bytes": model_bytes,
        "gb_per_s": moved / seconds,
        "plain_gb_per_s": moved / min(plain),
        "share_of_plain": min(plain) / seconds,
        "cpu_send_per_gib": send,
        "cpu_receive_per_gib": sum(it["cpu"] for it in receive) / (gib * _HOSTS),
        "cpu_host_per_gib": sum(it["cpu"] for it in answers[_SENDERS:]) / (gib * _HOSTS),
        "extra_bytes": max(it["grown_bytes"] for it in receive) - model_bytes,
        "bit_equal": all(it["digest"] == wanted for it in answers[_SENDERS:]),
    }


def plain_sockets(model_bytes: int) -> float:
    """Seconds for as many bytes from as many processes to as many, each pair over one connection, into memory of their size that
    is there already; nothing else is done."""
    part = model_bytes // _SENDERS
    with contextlib.ExitStack() as processes:
        receivers = [processes.enter_context(child(_receive, part)) for _ in range(_HOSTS)]
        senders = [processes.enter_context(child(_send, part)) for _ in range(_SENDERS)]
        try:
            addresses = [receiver.recv() for receiver in receivers]
            for sender in senders:
                sender.send(addresses)
            for sender in senders:
                sender.recv()
            began = time.time()
            for sender in senders:
                sender.send("go")
            return max(receiver.recv() for receiver in receivers) - began
        except EOFError:
            raise Failure("a process of the plain sockets ended") from None


def _receive(part: int, pipe: Pipe) -> None:
    memory = memoryview(bytearray(os.urandom(1) * (part * _SENDERS)))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(_SENDERS) as threads:
        pipe.send(server.getsockname())
        connections = [server.accept()[0] for _ in range(_SENDERS)]
        list(threads.map(_fill, connections, [memory[at * part : (at + 1) * part] for at in range(_SENDERS)]))
    pipe.send(time.time())
    pipe.recv()


def _fill(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        memory = memory[connection.recv_into(memory, min(len(memory), 4 << 20), socket.MSG_WAITALL) :]


def _send(part: int, pipe: Pipe) -> None:
    data = memoryview(os.urandom(1 << 20) * (part >> 20) + bytes(part & ((1 << 20) - 1)))
    connections = [socket.create_connection(address) for address in pipe.recv()]
    pipe.send("ready")
    pipe.recv()
    with ThreadPoolExecutor(_HOSTS) as threads:
        list(threads.map(lambda connection: connection.sendall(data), connections))
    pipe.recv()
