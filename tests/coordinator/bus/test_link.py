"""A connection while the coordinator's process does not run for a while, and what an outage leaves in the outbox."""

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
from verl_mux.coordinator.bus.link import Outbox, connect_to, dealer, pending

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


WHO = {"job": "a", "uid": "a:1", "client": "a-1"}


def all_of(outbox):
    out = []
    while (message := outbox.take()) is not None:
        out.append(message)
    return out


def test_an_hour_of_beats_and_progress_is_one_of_each_and_the_last():
    outbox = Outbox()
    for number in range(1, 3601):
        outbox.put(m.Heartbeat(**WHO, beat=number))
        outbox.put(m.Progress(**WHO, done=number, total=9999))
        outbox.put(m.PhaseNote(**WHO, note=str(number)))
    assert [getattr(message, "beat", getattr(message, "done", None)) for message in all_of(outbox)] == [3600, 3600, None]


def test_questions_steps_and_reports_of_other_things_all_stay_in_order():
    said = [
        m.LeaseRequest(**WHO, key="1", phase="rollout", step=1, nodes=["r0"]),
        m.LeaseRequest(**WHO, key="2", phase="train", step=1, nodes=["t0"]),
        m.LeaseRelease(**WHO, token=1),
        m.LeaseRelease(**WHO, token=2),
        m.LeaseCancel(**WHO, key="1"),
        m.StepReport(**WHO, step=1, metrics={}),
        m.StepReport(**WHO, step=2, metrics={}),
        m.MemoryReport(**WHO, node="r0", tags={"weights": 1}),
        m.MemoryReport(**WHO, node="r0", tags={"kv": 1}),
        m.MemoryReport(**WHO, node="t0", tags={"kv": 1}),
        m.HostReport(**WHO, node="r0", bytes={"private": 1}),
        m.HostReport(**WHO, node="t0", bytes={"private": 1}),
        m.Deregister(**WHO),
    ]
    outbox = Outbox()
    for message in (*said, *said):
        outbox.put(message)
    assert all_of(outbox) == said


def test_what_could_not_be_sent_comes_first_again_unless_something_newer_was_said():
    outbox = Outbox()
    outbox.put(m.Heartbeat(**WHO, beat=1))
    outbox.put(m.LeaseRelease(**WHO, token=1))
    taken = outbox.take()
    outbox.put_back(taken)
    assert outbox.take() == taken
    outbox.put(m.Heartbeat(**WHO, beat=2))
    outbox.put_back(taken)
    assert [message for message in all_of(outbox) if isinstance(message, m.Heartbeat)] == [m.Heartbeat(**WHO, beat=2)]
