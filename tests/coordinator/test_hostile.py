"""Whatever arrives at the socket, the coordinator answers the next who asks, and keeps nothing of it."""

import random

import msgspec
import pytest
import zmq

from tests.coordinator.core.placement.placed_jobs import AUTO, CPU, needs, pools
from tests.coordinator.raw import raw_dealer
from verl_mux.coordinator.bus import messages as m

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


class Raw:
    """A socket that says anything."""

    def __init__(self, address, identity):
        self.context = zmq.Context()
        self.dealer = raw_dealer(self.context, address, identity=identity)

    def send(self, *frames):
        self.dealer.send_multipart(list(frames))

    def answer(self):
        assert self.dealer.poll(20_000), "the coordinator does not answer"
        return m.decode(self.dealer.recv())

    def status(self):
        self.send(m.encode(m.StatusRequest()))
        while not isinstance(answer := self.answer(), m.Status):
            pass
        return answer.snapshot


@pytest.fixture
def speak():
    opened = []

    def open_one(coordinator, identity=WHO["client"]):
        opened.append(Raw(coordinator.address, identity))
        return opened[-1]

    yield open_one
    for raw in opened:
        raw.context.destroy(linger=0)


@pytest.fixture
def placing(serve):
    """A coordinator that places jobs; `pools` are those of tests/coordinator/core/test_placing.py."""
    return serve(pools=pools(2), placement={"kinds": {"cpu": CPU}})


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
        if number % 20 == 0:  # who never reads is answered no more
            raw.status()
        mutated = bytearray(chance.choice(real))
        for _ in range(chance.randint(1, 4)):
            mutated[chance.randrange(len(mutated))] = chance.randrange(256)
        raw.send(bytes(mutated))
        raw.send(*(chance.randbytes(chance.randint(0, 40)) for _ in range(chance.randint(1, 3))))
    assert raw.status()["refused"].get("faults", 0) == 0


def test_what_the_machine_fails_at_is_taken_back_and_never_journaled(serve, speak, make, tmp_path, monkeypatch):
    """A fault that nobody knows of yet."""
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
    raw.send(frame("LEASE_REQUEST", **WHO, **request))
    assert isinstance(raw.answer(), m.LeaseGrant)
    assert raw.status()["refused"] == {"faults": 1}


def test_a_failing_watch_does_not_end_the_service(serve, speak, monkeypatch, eventually):
    coordinator = serve()
    with monkeypatch.context() as patch:
        patch.setattr(coordinator._watch, "_look_for_dead_drivers", lambda: 1 / 0)
        eventually(lambda: coordinator.snapshot()["refused"].get("faults"))
    assert speak(coordinator).status()["jobs"] == {}


def test_the_largest_needs_are_estimated_at_once(placing, speak):
    raw = speak(placing)
    raw.send(asking(responses=2**24))
    assert isinstance(raw.answer(), m.Registered)
    assert raw.status()["placement"]["groups"]
