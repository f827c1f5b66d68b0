"""A server that dies under a real Ray."""

from __future__ import annotations

import tempfile

import pytest

pytestmark = pytest.mark.e2e


def test_the_trainer_hears_of_a_server_that_died_though_it_asks_it_nothing(python):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets lie deep in it, and have a limit to their names
        environment = {"VERL_PLATFORM": "cpu", "RAY_TMPDIR": folder, "RAY_ADDRESS": None}
        ended = python("-m", "tests.rollout.engine.dying_server", timeout=300, **environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = ended.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("alive", "ActorDiedError"), ended.stderr[-3000:]
