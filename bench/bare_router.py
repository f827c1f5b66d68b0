"""What ZeroMQ and this machine cost by themselves: a bare router that sends each frame back, beside which a heartbeat is held."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import zmq

from verl_mux.coordinator.bus.access.keys import JOB, for_address, for_bind
from verl_mux.coordinator.bus.link import dealer

_CLIENTS = 200
_OVER = b"over"


def echo_us(frame: bytes, per_second: float, seconds: float) -> float:
    """Microseconds of processor time per frame of the thread that receives it and sends it back, ZeroMQ's own threads left
    out; with the connections' encryption, from many clients in turn, as often as given."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_echo, args=(theirs,))
    process.start()
    address = ours.recv()
    context = zmq.Context()
    sockets = [dealer(context, f"client{number}", for_address(address, None, JOB)) for number in range(_CLIENTS)]
    for socket in sockets:
        socket.connect(address)
        socket.send(frame)
    for socket in sockets:
        socket.recv()  # all are connected, so that this is no part of what is measured
    ours.send(None)
    began = time.monotonic()
    for number in range(int(per_second * seconds)):
        time.sleep(max(0.0, began + number / per_second - time.monotonic()))
        sockets[number % _CLIENTS].send(frame)
    sockets[0].send(_OVER)
    found = ours.recv()
    context.destroy(linger=0)
    process.join()
    return found


def _echo(bench: Connection) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    keys = for_bind("tcp://127.0.0.1:0", None)
    socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, keys.public, keys.secret
    socket.bind("tcp://127.0.0.1:0")
    bench.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    for _ in range(_CLIENTS):
        socket.send_multipart(socket.recv_multipart())
    bench.recv()
    before, frames, said = time.thread_time(), 0, [b"", b""]
    while said[1] != _OVER:
        said = socket.recv_multipart()
        socket.send_multipart(said)
        frames += 1
    bench.send((time.thread_time() - before) * 1e6 / frames)
    context.destroy(linger=0)
