"""The serving loop: strangers, questions to the placer, and what it imports."""

import asyncio
import os
import subprocess
import sys
import uuid

import msgspec
import pytest
import zmq

from tests.coordinator.core.placement.placed_jobs import placing_config, register
from tests.coordinator.driver import Driver
from tests.coordinator.raw import Stranger
from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.records import Input
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.server import Planning, Refusals

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


def as_driver(member=None):
    member = member or members.this_process()
    return {**msgspec.structs.asdict(member), "nodes": NODES}


def test_forged_registrations_get_no_stranger_signalled(serve, stranger, victim):
    """A dead driver, and a living stranger among its members."""
    coordinator = serve(kill_grace=0.01)
    forger, target, me = stranger(coordinator.address), members.member_of(victim.pid), members.this_process()
    dead = msgspec.structs.replace(me, started=me.started - 6000)
    for number in range(300):
        who = {"job": f"forged{number}", "uid": uuid.uuid4().hex, "client": forger.identity}
        forger.say(
            m.Register(**who, **as_driver(dead if number % 2 else me), members=[target]), m.Failing(**who, reason="forged")
        )
    assert coordinator.snapshot()["refused"] == {"no such process": 150}
    assert victim.poll() is None


def test_only_the_connection_that_registered_speaks_for_a_job(serve, join, stranger):
    coordinator = serve()
    a, b = join(coordinator, "a", uid="a:known"), join(coordinator, "b")
    lease = a.acquire("rollout", step=1)
    thief = stranger(coordinator.address)
    by_name = {"job": "a", "uid": "a:known", "client": thief.identity}  # even with the uid, which it cannot know
    lying = {**by_name, "client": a._talk.sender["client"]}
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
    waiter.say(m.Register(**b, **as_driver()), m.LeaseRequest(**b, key="k", phase="rollout", step=1, nodes=["r0"]))
    thief.say(m.Register(**c, **as_driver()), m.LeaseCancel(**c, key="k"))
    # Nor does asking under the same key take its place.
    seen = thief.say(m.LeaseRequest(**c, key="k", phase="rollout", step=1, nodes=["r0"]), m.LeaseCancel(**c, key="k"))[1]
    assert [waiting["job"] for waiting in seen["pools"]["rollout"]["nodes"]["r0"]["queue"]] == ["b"]
    a.release(lease)


def test_strangers_that_claim_to_have_been_here_before_stop_nothing(serve, join, stranger):
    coordinator = serve(lease_timeout=1.5)
    a = join(coordinator, "a")
    a.release(a.acquire("rollout", step=1))
    forger = stranger(coordinator.address)
    for number in range(20):
        who = {"job": f"forged{number}", "uid": uuid.uuid4().hex, "client": forger.identity}
        forger.say(m.Register(**who, **as_driver(), again=True))
    a.release(a.acquire("rollout", step=2))
    assert coordinator._machine.state.settle_until is None


def test_no_output_tells_a_jobs_uid(serve, join, stranger, event_log, caplog):
    coordinator = serve()
    secret = f"a:{uuid.uuid4().hex}"
    a = join(coordinator, "a", uid=secret)
    a.release(a.acquire("rollout", step=1))
    other = stranger(coordinator.address)
    answers, seen = other.say(m.Register(job="b", uid=secret, client=other.identity, **as_driver()))
    a.close()
    noted = [repr(seen), repr(answers), repr(coordinator.snapshot()), repr(event_log.lines), caplog.text]
    assert not any(secret in text or os.path.basename(secret) in text for text in noted)


def test_an_answer_that_cannot_be_taken_is_counted_and_the_next_question_asked():
    machine, refusals = Machine(placing_config(count=2)), Refusals()
    for job in ("a", "b"):
        register(Driver(machine), job)

    async def answer_all():
        answers, over = [], asyncio.Event()

        def take(answer):
            answers.append(answer)
            if len(answers) == 1:
                raise RuntimeError("a fault of the machine, which has changed nothing")
            machine.handle(Input(10.0, answer))
            planning.look()
            if not machine.state.questions:
                over.set()

        planning = Planning(machine, take, lambda: 10.0, refusals)
        planning.look()
        await asyncio.wait_for(over.wait(), 30)
        planning.close()

    asyncio.run(answer_all())
    assert refusals.counts == {"faults": 1}
    (group,) = machine.state.placed.groups  # made from the record, not from the answer that was lost
    assert [job.name for job in group.jobs] == ["b"]


SCRIPT = """
import sys
import verl_mux.coordinator.commands
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
with Coordinator(make_config({"pools": {"rollout": {"nodes": [{"name": "r0"}]}}})) as coordinator:
    coordinator.snapshot()
print(*sys.modules)
"""


def test_a_coordinator_needs_no_library_for_tables_or_arrays():
    loaded = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout.split()
    assert "zmq" in loaded
    assert not {"numpy", "rich", "polars", "pandas"} & set(loaded)
