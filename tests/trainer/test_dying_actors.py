"""Actors of a job that die under a real Ray."""

from __future__ import annotations

import tempfile

import pytest

pytest.importorskip("ray")
from tests.trainer.dying_actors import KILLED, TOLD

pytestmark = pytest.mark.e2e

NAMES = [
    "TransferQueueController", "TransferQueueStorageUnit#0", "agent loop worker 0", "agent loop worker 1", "reward worker 0",
    "reward worker 1", "server 0 of replica 0", "server 0 of replica 1", "the load balancer",
]  # fmt: skip


def test_the_trainer_hears_of_an_actor_that_died_though_it_asks_it_nothing_and_is_ended_if_it_cannot(python):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets lie deep in it, and have a limit to their names
        environment = {"VERL_PLATFORM": "cpu", "RAY_TMPDIR": folder, "RAY_ADDRESS": None}
        ended = python("-m", "tests.trainer.dying_actors", timeout=300, **environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    heard = [f"no rollout can end any more: {name} died; ActorDiedError" for name in KILLED]
    told = [line.removeprefix(TOLD) for line in ended.stdout.splitlines() if line.startswith(TOLD)]
    assert told == [", ".join(NAMES), *heard, "ActorDiedError"], ended.stderr[-3000:]
