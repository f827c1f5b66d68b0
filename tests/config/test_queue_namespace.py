"""The TransferQueue of a job that carries a mark is found and made in a namespace of its own."""

import pytest

pytest.importorskip("verl")
from verl_mux.config import queue_namespace
from verl_mux.coordinator.bus.members import UID_VARIABLE

OURS, THEIRS = ("TransferQueueController", "transfer_queue_mine"), ("TransferQueueController", "transfer_queue")


@pytest.mark.parametrize(("mark", "name"), [("mine", OURS), ("", THEIRS)], ids=["a job of ours", "verl's own modes"])
def test_another_jobs_queue_is_not_taken(monkeypatch, mark, name):
    there = {("TransferQueueController", "transfer_queue_another"): "another job's"}

    def get_actor(*asked: str) -> str:
        if asked not in there:
            raise ValueError(asked)
        return there[asked]

    monkeypatch.setenv(UID_VARIABLE, mark)
    monkeypatch.setattr(queue_namespace.ray, "get_actor", get_actor)
    monkeypatch.setattr(queue_namespace.interface, "_TQ_CONTROLLER", None)
    monkeypatch.setattr(queue_namespace, "_find", lambda: True)
    monkeypatch.setattr(queue_namespace, "_options", lambda **given: (given["name"], given["namespace"]))
    assert not queue_namespace.interface._init_from_existing()
    # As TransferQueue makes it.
    made = queue_namespace.interface.TransferQueueController.options(name="TransferQueueController", namespace="transfer_queue")
    assert made == name
    there[made] = "the job's"
    assert queue_namespace.interface._init_from_existing() and queue_namespace.interface._TQ_CONTROLLER == "the job's"
