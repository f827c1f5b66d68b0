"""The probes for the first hour on a GPU run here with tiny sizes, each in its own process, and each is right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("probe.py")
NAMES = ["segments", "libraries", "graphs", "no_room", "states", "uneven", "region", "columns", "sync", "contents"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a host is made as Linux makes it")
def test_each_probe_says_a_line_and_is_right():
    done = subprocess.run([sys.executable, str(PROBE), "--cpu"], capture_output=True, text=True, check=False, timeout=120)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [it["probe"] for it in found] == NAMES
    assert done.returncode == 0 and all(it["right"] for it in found), done.stdout + done.stderr
