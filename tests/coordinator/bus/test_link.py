"""A connection while the coordinator's process does not run for a while, and when many come at once."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest
import zmq

from bench.coordinator_process import CoordinatorProcess
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.curve_keys import JOB, for_address
from verl_mux.coordinator.bus.link import connect_to, dealer, pending

CONFIG = {"pools": {"rollout": {"nodes": [{"name": "r0"}]}}}
AT_ONCE = 300


@pytest.fixture
def coordinator():
    with CoordinatorProcess(CONFIG) as coordinator:
        yield coordinator


@contextlib.contextmanager
def stopped(coordinator):
    os.kill(coordinator.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(coordinator.pid, signal.SIGCONT)


def test_who_does_not_answer_for_a_while_is_not_taken_for_dead(coordinator):
    """Else whoever is starved of processor time loses all its connections, and making them again starves it more."""
    with zmq.Context() as context:
        client = dealer(context, None, for_address(coordinator.address, None, JOB))
        monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        connect_to(coordinator.address, client)
        assert monitor.poll(60_000)
        assert [event for event, _ in pending(monitor)] == [zmq.EVENT_HANDSHAKE_SUCCEEDED]
        with stopped(coordinator):
            client.send(m.encode(m.StatusRequest()))
            assert not monitor.poll(6_000)
        assert client.poll(60_000)
        client.disable_monitor()
        context.destroy(linger=0)


@pytest.mark.skipif(int(Path("/proc/sys/net/core/somaxconn").read_text()) < AT_ONCE, reason="this kernel keeps fewer")
def test_many_may_come_at_once(coordinator):
    """Who finds no room in the kernel's queue tries again after seconds, and then ever later."""
    host, _, port = coordinator.address.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as stack, stopped(coordinator):
        for _ in range(AT_ONCE):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=0.9))


def test_the_kernel_gives_up_a_connection_that_died_without_a_word():
    with zmq.Context() as context:
        server = context.socket(zmq.ROUTER)
        address = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
        client = dealer(context, None, None)
        connect_to(address, client)
        client.send(b"beat")
        server.recv_multipart()
        assert 5000 in [connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for connection in tcp_connections()]
        context.destroy(linger=0)


def tcp_connections():
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as found:
            if found.family == socket.AF_INET:
                yield found
