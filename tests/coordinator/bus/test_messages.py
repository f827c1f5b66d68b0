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
    m.TaskRequest(worker_id="Actor_2"),
    m.NewTask(worker_id="Actor_2", prompt=[1, 2, 3]),
    m.DataGenerated(slot_id=2),
    m.RewardComputed(slot_id=2, reward=1.0),
    m.LearnerStateUpdate(entropy=0.85, policy_version=2),
    m.Migrate(source="w0", target="w1", request_ids=["q"]),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message):
    assert m.decode(m.encode(message)) == message


@pytest.mark.parametrize(
    ("message", "tag"),
    [
        (m.TaskRequest, "TASK_REQUEST"),
        (m.NewTask, "NEW_TASK"),
        (m.DataGenerated, "DATA_GENERATED"),
        (m.RewardComputed, "REWARD_COMPUTED"),
        (m.LearnerStateUpdate, "LEARNER_STATE_UPDATE"),
    ],
)
def test_the_names_of_dispatch_messages_are_kept(message, tag):
    assert message.__struct_config__.tag == tag


def test_every_message_carries_the_version():
    plain = msgspec.msgpack.decode(m.encode(m.DataGenerated(slot_id=2)))
    assert plain == {"type": "DATA_GENERATED", "version": m.VERSION, "slot_id": 2, "policy_version": None, "num_tokens": None}


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
