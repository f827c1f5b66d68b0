"""Keep the TransferQueue of each of our jobs in a Ray namespace of its own, so that several jobs share a Ray cluster.

plugin.py has it imported right after `transfer_queue.interface`, in every process that uses the queue. TransferQueue finds its
controller by one name in one namespace of the cluster: a second job would take the first one's, and end it at its own end. The
namespace here follows from the job's mark, which all its processes have in their environment; without a mark nothing changes.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray
import transfer_queue.interface as interface

CONTROLLER, THEIRS = "TransferQueueController", "transfer_queue"
_find, _options = interface._init_from_existing, interface.TransferQueueController.options


def namespace() -> str:
    """Of this process's job."""
    from verl_mux.coordinator.bus.members import UID_VARIABLE  # not where `import verl` brings this module in

    return f"{THEIRS}_{uid}" if (uid := os.environ.get(UID_VARIABLE)) else THEIRS


def _init_from_existing() -> bool:
    if interface._TQ_CONTROLLER is None:
        with contextlib.suppress(ValueError):  # there is none yet
            interface._TQ_CONTROLLER = ray.get_actor(CONTROLLER, namespace())
    return interface._TQ_CONTROLLER is not None and _find()


def options(**given: Any) -> Any:
    return _options(**{**given, "namespace": namespace()})


interface._init_from_existing, interface.TransferQueueController.options = _init_from_existing, options
