"""Both ends of a connection: an outage and its outbox, what the coordinator's socket reads, and which connections it accepts."""

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest
import zmq

from bench.coordinator_process import CoordinatorProcess
from verl_mux.coordinator.bus import curve_keys as keys
from verl_mux.coordinator.bus import link
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.link import Outbox, Router, ask, connect_to, dealer, pending
from verl_mux.coordinator.bus.members import this_process
from verl_mux.coordinator.commands import fetch_status
from verl_mux.errors import UserError

CONFIG = {"pools": {"rollout": {"nodes": [{"name": "r0"}]}}}
AT_ONCE = 300


@pytest.fixture
def coordinator_process():
    with CoordinatorProcess(CONFIG) as coordinator:
        yield coordinator


@contextlib.contextmanager
def stopped(coordinator):
    os.kill(coordinator.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(coordinator.pid, signal.SIGCONT)


def test_a_coordinator_that_does_not_answer_for_a_while_is_not_taken_for_dead(coordinator_process, context):
    """Else a process that is starved of processor time loses all its connections, and making them again starves it more."""
    client = dealer(context, None, keys.for_address(coordinator_process.address, None, keys.JOB))
    monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    connect_to(coordinator_process.address, client)
    assert monitor.poll(60_000)
    assert [event for event, _ in pending(monitor)] == [zmq.EVENT_HANDSHAKE_SUCCEEDED]
    with stopped(coordinator_process):
        client.send(m.encode(m.StatusRequest()))
        assert not monitor.poll(6_000)
    assert client.poll(60_000)
    client.disable_monitor()


@pytest.mark.skipif(int(Path("/proc/sys/net/core/somaxconn").read_text()) < AT_ONCE, reason="this kernel keeps fewer")
def test_many_may_come_at_once(coordinator_process):
    """A client that finds no room in the kernel's queue tries again after seconds, and then ever later."""
    host, _, port = coordinator_process.address.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as stack, stopped(coordinator_process):
        for _ in range(AT_ONCE):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=0.9))


def test_the_kernel_gives_up_a_connection_that_died_without_a_word(context):
    server = context.socket(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
    client = dealer(context, None, None)
    connect_to(address, client)
    client.send(b"beat")
    server.recv_multipart()
    assert 5000 in [connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for connection in tcp_connections()]


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


# --- the coordinator's end ---

# What the kernel holds on both sides of a loopback connection, at most, in frames of the size allowed.
IN_THE_KERNEL = 24
MANY = 200


def fill(client: zmq.Socket) -> int:
    """How many of the largest frames go out, while this thread, which is the Router's, reads none."""
    frame = bytes(m.FRAME_BYTES - 100)
    for count in range(MANY):
        if not client.poll(1_000, zmq.POLLOUT):
            return count
        client.send(frame)
    return MANY


def test_what_a_client_sends_to_a_coordinator_that_does_not_read_waits_at_the_client():
    address = "tcp://127.0.0.1:0"

    async def sent() -> int:
        connected = asyncio.Event()
        router = Router(address, keys.for_bind(address, None), lambda *_: connected.set())
        with zmq.Context() as context:
            client = dealer(context, None, keys.for_address(address, None, keys.JOB))
            client.linger, client.sndhwm = 0, 1
            connect_to(router.address, client)
            client.send(b"")
            await asyncio.wait_for(connected.wait(), 60)
            count = fill(client)
            client.close()
        router.close()
        return count

    assert asyncio.run(sent()) <= m.UNREAD_PER_CLIENT + IN_THE_KERNEL


NODES = {"rollout": ["r0"], "train": ["t0"]}


@pytest.fixture
def folders(tmp_path):
    """Two folders of keys."""
    made = tmp_path / "ours", tmp_path / "others"
    for folder in made:
        keys.make(folder)
    return made


def test_a_client_without_a_key_is_refused_in_one_line(serve, folders):
    coordinator = serve(key_directory=folders[0])
    with pytest.raises(UserError, match="wants a key: name the folder it was started with by --keys DIR"):
        ask(coordinator.address, m.StatusRequest(), 60, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("none", r"has another key than .*unused/verl_mux/keys/server.key"),
        ("others", r"has another key than .*others/server.key"),
        ("unknown", r"does not know .*job.key_secret"),
    ],
)
def test_a_client_with_another_key_is_refused_in_one_line(serve, folders, monkeypatch, tmp_path, given, words):
    ours, others = folders
    coordinator = serve(key_directory=ours)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "unused"))
    if given == "unknown":  # the right server, and a key of another user
        (others / "server.key").write_text((ours / "server.key").read_text())
        (others / "viewer.key_secret").unlink()
    monkeypatch.setattr(link, "_RESTARTED_WITHIN_S", 1.0)  # a job waits for so long: the coordinator may have new keys
    folder = None if given == "none" else others
    with pytest.raises(UserError, match=words):
        fetch_status(coordinator.address, 60, folder)
    with pytest.raises(UserError, match=words):
        connect(coordinator.address, "a", NODES, keys=folder and str(folder), timeout=60)
    assert coordinator.snapshot()["jobs"] == {}


def test_a_viewer_may_look_and_nothing_else(serve, folders, tmp_path):
    ours = folders[0]
    coordinator = serve(key_directory=ours)
    (ours / "job.key_secret").unlink()
    (ours / "operator.key_secret").unlink()
    assert fetch_status(coordinator.address, 60, ours)["jobs"] == {}
    with pytest.raises(UserError, match="the key of a viewer was used, with which no client may send REGISTER"):
        connect(coordinator.address, "a", NODES, keys=str(ours), timeout=60)
    assert coordinator.snapshot()["refused"]["not for a viewer"] >= 1
    assert coordinator.snapshot()["jobs"] == {}


@pytest.mark.parametrize("role", [keys.VIEWER, keys.OPERATOR])
def test_a_lease_takes_the_key_of_a_job(serve, stranger, role):
    coordinator = serve()
    stranger = stranger(coordinator.address, role=role)
    me = this_process()
    who = {"job": "a", "uid": "a:1", "client": stranger.identity}
    where = {name: getattr(me, name) for name in me.__struct_fields__}
    asked = m.Register(**who, **where, nodes=NODES), m.LeaseRequest(**who, key="k", phase="rollout", step=1, nodes=["r0"])
    answers, seen = stranger.say(*asked)
    assert [(type(answer), answer.about) for answer in answers] == [(m.Refused, "register"), (m.Refused, "k")]
    assert seen["refused"] == {f"not for a {role}": 2}
    assert seen["jobs"] == {}


def test_a_job_outlasts_a_coordinator_with_other_keys(serve, join, folders, eventually):
    coordinator = serve(key_directory=folders[0])
    a = join(coordinator, "a", keys=str(folders[0]))
    coordinator.stop()
    other = serve(bind=coordinator.address, key_directory=folders[1])
    eventually(lambda: a._link.refused is not None)
    other.stop()
    again = serve(bind=coordinator.address, key_directory=folders[0], lease_timeout=1.5)
    eventually(lambda: "a" in again.snapshot()["jobs"])
    a.release(a.acquire("rollout", step=1))


def test_a_connection_that_shows_no_key_is_closed(serve, join, monkeypatch):
    """Each is an open file of the coordinator's."""
    monkeypatch.setattr(link, "_HANDSHAKE_MS", 300)
    coordinator = serve()
    host, port = coordinator.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as silent, contextlib.suppress(ConnectionResetError):
        silent.settimeout(15)
        while silent.recv(1024):
            pass
    assert join(coordinator, "a").acquire("rollout", step=1).token == 1
