"""The serving loop: strangers, hostile frames, questions to the placer, and what it imports."""

import asyncio
import os
import random
import subprocess
import sys
import uuid

import msgspec
import pytest

from tests.coordinator.core.placement.placed_jobs import AUTO, needs, placing_config, pools, register
from tests.coordinator.driver import Driver
from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import state
from verl_mux.coordinator.core.records import Input
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.server import Planning, Refusals

NODES = {"rollout": ["r0"], "train": ["t0"]}


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


@pytest.mark.parametrize("empty", ["job", "uid"])
def test_a_job_without_a_name_or_a_uid_is_refused_and_keeps_no_other_out(serve, join, stranger, empty):
    coordinator = serve()
    nameless = stranger(coordinator.address)
    nameless.send(frame("REGISTER", **{**REGISTER, "client": nameless.identity, empty: ""}, nodes={"rollout": ["r0"]}))
    assert "length >= 1" in nameless.answer().reason
    assert join(coordinator, "b").acquire("rollout", step=1).token == 1


def test_a_job_that_floods_is_held_to_its_share_and_slows_no_other(serve, join, stranger, monkeypatch):
    monkeypatch.setattr(m, "BYTES_AT_ONCE", 20_000)
    coordinator = serve()
    flooding = stranger(coordinator.address)
    who = {"job": "b", "uid": "b:1", "client": flooding.identity}
    reports = [m.StepReport(**who, step=1, metrics={"x" * 200: float(at)}) for at in range(300)]
    a = join(coordinator, "a")
    seen = flooding.say(m.Register(**who, **as_driver()), *reports)[1]
    assert 0 < seen["refused"]["beyond a job's share"] < 300
    flooding.say(*[msgspec.structs.replace(report, job="a") for report in reports])  # nor in the name of another one
    a.release(a.acquire("rollout", step=1))


def test_when_records_are_many_a_large_job_does_not_grow_and_a_small_one_may_still_come(serve, join, stranger, monkeypatch):
    monkeypatch.setattr(m, "RECORD_BYTES", 20_000)
    monkeypatch.setattr(state, "_HANDLED_AGAIN", 1)
    coordinator = serve()
    large = stranger(coordinator.address)
    who = {"job": "large", "uid": "large:1", "client": large.identity}
    many = [m.Member("elsewhere" * 20, pid, 1, "boot") for pid in range(150)]
    seen = large.say(m.Register(**who, **as_driver(), members=many), *[m.MemberReport(**who, members=many)] * 3)[1]
    assert seen["jobs"]["large"]["state"] == "live" and seen["refused"]["beyond a job's share"] >= 1
    assert join(coordinator, "small").acquire("rollout", step=1).token == 1


def test_no_output_tells_a_jobs_uid_or_the_name_of_its_connection(serve, join, stranger, event_log, caplog):
    coordinator = serve()
    secret = f"a:{uuid.uuid4().hex}"
    a = join(coordinator, "a", uid=secret)
    connection = a._talk.sender["client"]
    a.release(a.acquire("rollout", step=1))
    other = stranger(coordinator.address)
    answers, seen = other.say(m.Register(job="b", uid=secret, client=other.identity, **as_driver()))
    a.close()
    noted = [repr(seen), repr(answers), repr(coordinator.snapshot()), repr(event_log.lines), caplog.text]
    assert not any(word in text for word in (secret, os.path.basename(secret), connection) for text in noted)


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


# --- hostile frames: the coordinator answers the next request, and keeps nothing of them ---

WHO = {"job": "a", "uid": "a:1", "client": "a-1"}
REGISTER = {**WHO, "host": "elsewhere", "pid": 7, "started": 1}
NESTED = b"\x91" * 1200 + b"\x90"


def frame(kind, **fields):
    return msgspec.msgpack.encode({"type": kind, "version": m.VERSION, **fields})


def asking(**needed):
    return frame("REGISTER", **REGISTER, nodes=AUTO, needs={**msgspec.to_builtins(needs()), **needed})


HOSTILE = {
    "a tag that is no UTF-8": b"\x81\xa4type\xa1\xdc",
    "deep nesting": b"\x81\xa4type" + NESTED,
    "deep nesting within a field": frame("REGISTER", **REGISTER, nodes={"rollout": ["r0"]})[:-20] + NESTED,
    "nothing": b"",
    "a length of 4 GiB": b"\x81\xa4type\xdb\xff\xff\xff\xff",
    "no GPUs in a replica": asking(replica_gpus=0),
    "no training nodes": asking(train_nodes=0),
    "2**60 responses": asking(responses=2**60),
    "placed on no side": frame(
        "REGISTER", **REGISTER, nodes=AUTO, again=True, placed={"x": ["r0"]}, needs=msgspec.to_builtins(needs())
    ),
    "placed on an unknown node": frame(
        "REGISTER", **REGISTER, nodes=AUTO, again=True, placed={"rollout": ["r7"], "train": ["t0"]},
        needs=msgspec.to_builtins(needs()),
    ),
    "a claim of the last token": frame(
        "REGISTER", **REGISTER, nodes={"rollout": ["r0"]}, again=True,
        held=[{"token": 2**64 - 1, "key": "k", "phase": "rollout", "step": 1, "nodes": ["r0"], "granted_at": 1.0}],
    ),
    "a pid beyond all": frame("REGISTER", **{**REGISTER, "pid": 2**40}, nodes={"rollout": ["r0"]}),
    "started at NaN": frame("REGISTER", **{**REGISTER, "started": float("nan")}, nodes={"rollout": ["r0"]}),
    "a name of 10,000 letters": frame("REGISTER", **{**REGISTER, "job": "a" * 10_000}, nodes={"rollout": ["r0"]}),
    "a million nodes": frame("REGISTER", **REGISTER, nodes={"rollout": ["r0"] * 100_000}),
    "an answer": m.encode(m.Unknown()),
}  # fmt: skip


@pytest.fixture
def speak(stranger):
    return lambda coordinator, identity=WHO["client"]: stranger(coordinator.address, identity=identity)


@pytest.fixture
def placing(serve):
    """A coordinator that places jobs; `pools` are those of tests/coordinator/core/test_placing.py."""
    return serve(pools=pools(2), placement={})


def test_a_frame_of_another_protocol_version_is_answered_with_both(serve, speak):
    raw = speak(serve())
    raw.send(msgspec.msgpack.encode({"type": "REGISTER", "version": 99}))
    assert f"protocol version 99 met version {m.VERSION}" in raw.answer().reason


@pytest.mark.parametrize("name", HOSTILE)
def test_no_frame_ends_the_service_or_leaves_a_trace(placing, speak, name):
    raw = speak(placing)
    before = placing._machine.state.token
    raw.send(HOSTILE[name])
    after = raw.status()
    assert after["jobs"] == {} and after["token"] == before and placing._machine.state.settle_until is None
    assert after["refused"] == {} or "faults" not in after["refused"]


def test_a_refused_frame_is_answered_and_counted(placing, speak):
    raw = speak(placing)
    raw.send(asking(replica_gpus=0))
    refused = raw.answer()
    assert refused.about == "register" and "Expected `int` >= 1 - at `$.needs.replica_gpus`" in refused.reason
    assert raw.status()["refused"] == {"frames refused": 1}


def test_a_frame_beyond_the_limit_is_not_even_read(serve, speak):
    coordinator = serve()
    speak(coordinator).send(b"\0" * (m.FRAME_BYTES + 1))
    assert speak(coordinator, "another").status()["refused"] == {}


def test_random_and_mutated_frames_do_no_harm(serve, speak):
    coordinator, chance = serve(), random.Random(5)
    raw = speak(coordinator)
    real = [frame("REGISTER", **REGISTER, nodes={"rollout": ["r0"]}, needs=msgspec.to_builtins(needs())), asking()]
    for number in range(300):
        if number % 20 == 0:  # a client that never reads is answered no more
            raw.status()
        mutated = bytearray(chance.choice(real))
        for _ in range(chance.randint(1, 4)):
            mutated[chance.randrange(len(mutated))] = chance.randrange(256)
        raw.send(bytes(mutated))
        raw.send(*(chance.randbytes(chance.randint(0, 40)) for _ in range(chance.randint(1, 3))))
    assert raw.status()["refused"].get("faults", 0) == 0


def test_what_the_machine_fails_at_is_taken_back_and_never_journaled(serve, speak, make, tmp_path, monkeypatch, caplog):
    """A fault that is not known yet."""
    coordinator = serve(tmp_path / "journal")
    raw = speak(coordinator)
    raw.send(frame("REGISTER", **REGISTER, nodes={"rollout": ["r0"]}))
    raw.answer()
    state, append = msgspec.msgpack.encode(coordinator._machine.state), coordinator._journal.append
    journaled = []
    monkeypatch.setattr(coordinator._journal, "append", lambda *given: journaled.append(given) or append(*given))
    monkeypatch.setattr(coordinator._machine, "_settle", lambda now: 1 / 0)  # when the request is already in its queue
    request = {"key": "k", "phase": "rollout", "step": 1, "nodes": ["r0"]}
    raw.send(frame("LEASE_REQUEST", **WHO, **request))
    assert raw.answer().about == "k"
    monkeypatch.undo()
    assert msgspec.msgpack.encode(coordinator._machine.state) == state and journaled == []
    assert "faults (1 of this kind by now): k of job 'a'" in caplog.text and WHO["client"] not in caplog.text
    raw.send(frame("LEASE_REQUEST", **WHO, **request))
    assert isinstance(raw.answer(), m.LeaseGrant)
    assert raw.status()["refused"] == {"faults": 1}


def test_a_failing_watch_does_not_end_the_service(serve, speak, monkeypatch, eventually):
    coordinator = serve()
    with monkeypatch.context() as patch:
        patch.setattr(coordinator._watch, "_jobs", lambda *states: 1 / 0)
        eventually(lambda: coordinator.snapshot()["refused"].get("faults"))
    assert speak(coordinator).status()["jobs"] == {}


def test_the_largest_needs_are_estimated_at_once(placing, speak):
    raw = speak(placing)
    raw.send(asking(responses=2**24))
    assert isinstance(raw.answer(), m.Registered)
    assert raw.status()["placement"]["groups"]
