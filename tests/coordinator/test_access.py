"""Strangers on the coordinator's socket: what they send in a job's name does nothing, and is counted."""

import os
import subprocess
import sys
import uuid

import msgspec
import pytest
import zmq

from tests.coordinator.raw import Stranger
from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m

NODES = {"rollout": ["r0"], "train": ["t0"]}


@pytest.fixture
def stranger():
    """Makes connections by hand."""
    with zmq.Context() as context:
        made = []

        def make(address, **keys):
            made.append(Stranger(context, address, **keys))
            return made[-1]

        yield make
        for one in made:
            one.dealer.close(linger=0)


@pytest.fixture
def victim():
    """A process that has nothing to do with any job."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def driver(member=None):
    member = member or members.this_process()
    return {**msgspec.structs.asdict(member), "nodes": NODES}


def test_forged_registrations_get_no_stranger_signalled(serve, stranger, victim):
    """A dead driver, and a living stranger among its members."""
    coordinator = serve(kill_grace=0.01)
    forger, target, me = stranger(coordinator.address), members.member_of(victim.pid), members.this_process()
    dead = msgspec.structs.replace(me, started=me.started - 6000)
    for number in range(300):
        who = {"job": f"forged{number}", "uid": uuid.uuid4().hex, "client": forger.identity}
        forger.say(m.Register(**who, **driver(dead if number % 2 else me), members=[target]), m.Failing(**who, reason="forged"))
    assert coordinator.snapshot()["refused"] == {"no such process": 150}
    assert victim.poll() is None


def test_only_the_connection_that_registered_speaks_for_a_job(serve, join, stranger):
    coordinator = serve()
    a, b = join(coordinator, "a", uid="a:known"), join(coordinator, "b")
    lease = a.acquire("rollout", step=1)
    thief = stranger(coordinator.address)
    by_name = {"job": "a", "uid": "a:known", "client": thief.identity}  # even with the uid, which nobody tells it
    lying = {**by_name, "client": a._talk.who["client"]}
    for who in (by_name, lying):
        answers, seen = thief.say(
            m.Deregister(**who), m.LeaseRelease(**who, token=lease.token), m.Detach(**who), m.Failing(**who, reason="x")
        )
        assert [type(answer) for answer in answers] == [m.Unknown if who is by_name else m.Refused] * 4
    assert seen["refused"] == {"another's message": 4}
    assert seen["jobs"]["a"]["tokens"] == [lease.token]
    a.release(lease)
    b.release(b.acquire("rollout", step=1))


def test_a_request_is_cancelled_by_its_own_job_alone(serve, join, stranger):
    coordinator = serve()
    a = join(coordinator, "a")
    lease = a.acquire("rollout", step=1)
    waiter, thief = stranger(coordinator.address), stranger(coordinator.address)
    b, c = ({"job": name, "uid": f"{name}:1", "client": who.identity} for name, who in (("b", waiter), ("c", thief)))
    waiter.say(m.Register(**b, **driver()), m.LeaseRequest(**b, key="k", phase="rollout", step=1, nodes=["r0"]))
    thief.say(m.Register(**c, **driver()), m.LeaseCancel(**c, key="k"))
    # Nor does asking under the same key take its place.
    seen = thief.say(m.LeaseRequest(**c, key="k", phase="rollout", step=1, nodes=["r0"]), m.LeaseCancel(**c, key="k"))[1]
    assert [waiting["job"] for waiting in seen["pools"]["rollout"]["nodes"]["r0"]["queue"]] == ["b"]
    a.release(lease)


def test_strangers_who_say_that_they_were_here_before_stop_nothing(serve, join, stranger):
    coordinator = serve(lease_timeout=1.5)
    a = join(coordinator, "a")
    a.release(a.acquire("rollout", step=1))
    forger = stranger(coordinator.address)
    for number in range(20):
        who = {"job": f"forged{number}", "uid": uuid.uuid4().hex, "client": forger.identity}
        forger.say(m.Register(**who, **driver(), again=True))
    settling = coordinator._machine.state.settle_until
    forger.say(m.Register(job="late", uid="late:1", client=forger.identity, **driver(), again=True))
    assert coordinator._machine.state.settle_until == settling  # put off no further
    a.release(a.acquire("rollout", step=2))
    for number in range(20, 40):
        who = {"job": f"forged{number}", "uid": uuid.uuid4().hex, "client": forger.identity}
        forger.say(m.Register(**who, **driver(), again=True))
    assert coordinator._machine.state.settle_until is None  # it has settled once


def test_no_output_tells_a_jobs_uid(serve, join, stranger, event_log, caplog):
    coordinator = serve()
    secret = f"a:{uuid.uuid4().hex}"
    a = join(coordinator, "a", uid=secret)
    a.release(a.acquire("rollout", step=1))
    other = stranger(coordinator.address)
    answers, seen = other.say(m.Register(job="b", uid=secret, client=other.identity, **driver()))
    a.close()
    told = [repr(seen), repr(answers), repr(coordinator.snapshot()), repr(event_log.lines), caplog.text]
    assert not any(secret in text or os.path.basename(secret) in text for text in told)
