"""verl's own TransferQueue in the test's process, without Ray."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf


def of_actor(remote):
    """The class behind a Ray actor's."""
    return remote.__ray_metadata__.modified_class


@pytest.fixture
def queue(monkeypatch):
    from transfer_queue import interface
    from transfer_queue.client import TransferQueueClient
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    controller, unit = of_actor(TransferQueueController)(), of_actor(SimpleStorageUnit)({})
    client = TransferQueueClient("trainer", controller.get_zmq_server_info())
    units = OmegaConf.create({"zmq_info": {"unit": unit.get_zmq_server_info()}}, flags={"allow_objects": True})
    client.initialize_storage_manager("SimpleStorage", units)
    monkeypatch.setattr(interface, "_TQ_CLIENT", client)
    yield
    client.close()
