"""An outage leaves one word on each thing behind it."""

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.link import Outbox

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
