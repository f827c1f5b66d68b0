"""A host of the job is cut off: a real cable, a real kernel's answers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hosts.conftest import via

pytestmark = pytest.mark.e2e
LIMIT_S = 4.0

_LISTEN = """
import socket, time
listener = socket.create_server(("0.0.0.0", 7070))
print("ready", flush=True)
listener.accept()
print("asked", flush=True)
time.sleep(600)
"""
_WATCH = """
import sys, time
from verl_mux.trainer.job_hosts import HostWatch
watch = HostWatch({"the host of t1": (sys.argv[1], 7070)}, float(sys.argv[2]), lambda lost: print(lost, flush=True), 0.2)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def running(bed):
    """What runs on hosts, until the test ends."""
    started = []

    def run(host: str, code: str, *words: str) -> subprocess.Popen:
        started.append(subprocess.Popen([*via(host), sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_a_cable_out_for_longer_than_a_lease_is_told(bed, running):
    listening = running("hostb", _LISTEN)
    watching = running("hosta", _WATCH, bed.hosts()["hostb"].address, f"{LIMIT_S}")
    assert listening.stdout.readline() == "asked\n"
    bed.link("hostb", up=False)
    try:
        assert watching.stdout.readline() == "the host of t1 could not be reached for 4 s\n"
    finally:
        bed.link("hostb", up=True)
