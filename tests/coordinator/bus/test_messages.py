"""The wire format: what goes in comes out, and anything else is refused by name."""

import msgspec
import pytest

from verl_mux.coordinator.bus import messages as m

WHO = {"job": "a", "uid": "a:1", "client": "c"}
EXAMPLES = [
    m.Register(**WHO, host="h", pid=1, started=2, nodes={"rollout": ["r0"]}, members=[m.Member("h", 3, 4, "boot")]),
    m.LeaseRequest(**WHO, key="k", phase="rollout", step=1, nodes=["r0"]),
    m.LeaseGrant(epoch="e", key="k", token=1, phase="rollout", step=1, nodes=["r0"], granted_at=1.5),
    m.Status(snapshot={"jobs": {}}),
    m.LearnerStateUpdate(entropy=0.85, policy_version=2),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message):
    assert m.decode(m.encode(message)) == message


def test_every_message_carries_the_version():
    plain = msgspec.msgpack.decode(m.encode(m.LearnerStateUpdate(entropy=0.5, policy_version=2)))
    assert plain == {"type": "LEARNER_STATE_UPDATE", "version": m.VERSION, "entropy": 0.5, "policy_version": 2}


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (msgspec.msgpack.encode({"type": "HEARTBEAT", "version": 99, "other": 1}), "protocol version 99 met"),
        (msgspec.msgpack.encode({"type": "NO_SUCH", "version": m.VERSION}), "Invalid value 'NO_SUCH'"),
        (msgspec.msgpack.encode({"type": "LEASE_CANCEL", "version": m.VERSION, **WHO}), "missing required field `key`"),
        (b"\xff\xfe", "not a verl-mux control message"),
        (b"", "not a verl-mux control message"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(frame, words):
    with pytest.raises(m.Unreadable, match=words):
        m.decode(frame)


REGISTERING = {**WHO, "host": "h", "pid": 1, "started": 1, "nodes": {"rollout": ["r0"]}}
SHOWN = [
    *(m.Register(**{**REGISTERING, field: "a\x1b[31m"}) for field in ("job", "uid", "client", "host")),
    *(m.Register(**{**REGISTERING, "job": f"a{letter}"}) for letter in "\n\x00\x7f\x9b\u202e"),
    m.Register(**REGISTERING, members=[m.Member("\x1b", 1, 1, "b")]),
    m.JobOver(job="\x1b", uid="u"),
    m.PhaseNote(**WHO, note="\x1b[2J"),
    m.Failing(**WHO, reason="\x9b"),
    m.Deregister(**WHO, reason="\r"),
    m.StepReport(**WHO, step=1, metrics={"\x07": 1.0}),
    m.MemoryReport(**WHO, node="r0", tags={"\x1b": 1}),
]


@pytest.mark.parametrize("message", SHOWN, ids=range(len(SHOWN)))
def test_what_is_shown_to_people_holds_nothing_that_a_terminal_acts_upon(message):
    with pytest.raises(m.Unreadable, match="Expected `str` without control characters - at"):
        m.decode(m.encode(message))


def test_names_in_any_script_and_texts_of_several_lines_are_fine():
    for message in (m.Register(**{**REGISTERING, "job": "日本 été-7"}), m.Failing(**WHO, reason="out of memory:\n\ton GPU 3")):
        assert m.decode(m.encode(message)) == message
