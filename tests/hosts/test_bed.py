"""What makes a host of a namespace: its own name, address, processes, shared memory and temporary files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import EXAMPLE, HOSTS, SUBNET, via

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


def _on(host: str, *command: str) -> str:
    return subprocess.run([*via(host), *command], capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def test_each_host_has_its_name_and_the_others_are_known_by_theirs(bed):
    assert [_on(host, "hostname") for host in HOSTS] == list(HOSTS)
    ask = "import socket; print(socket.gethostbyname('hostb'), socket.gethostbyname(socket.gethostname()))"
    assert _on("hosta", sys.executable, "-c", ask).split() == [f"{SUBNET}.2", f"{SUBNET}.1"]


def test_hosts_see_their_own_processes_alone(bed):
    # its first process, the one that looks, and nothing of this machine
    assert len([name for name in _on("hosta", "ls", "/proc").split() if name.isdigit()]) == 2


def test_a_weight_sync_tells_hosts_apart_and_knows_its_own(bed):
    ask = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", "from verl_mux.sync.ends import this_machine as it; print(it())"]
    first, again, other = (_on(host, *ask) for host in ("hosta", "hosta", "hostb"))
    assert first == again != other


def test_what_is_in_shared_memory_and_tmp_stays_on_the_host(bed, tmp_path):
    _on("hosta", "touch", "/dev/shm/mine", "/tmp/mine")
    assert _on("hostb", "ls", "/dev/shm") == "" and "mine" not in _on("hostb", "ls", "/tmp").split()
    assert not os.path.exists("/dev/shm/mine") and not os.path.exists("/tmp/mine")
    _on("hosta", "rm", "/dev/shm/mine")  # later tests on this bed look for what jobs leave there
    _on("hosta", "touch", str(tmp_path / "shared"))
    assert (tmp_path / "shared").exists() and "shared" in _on("hostb", "ls", str(tmp_path))


# A cable plugged in carries when the kernel has noticed, up to seconds later; until then a host asked before is given up.
ASK = """
import socket, sys, time
until = time.monotonic() + float(sys.argv[1])
while True:
    try:
        sys.exit(socket.create_connection(("hostb", 4000), 2).close())
    except OSError:
        if time.monotonic() > until:
            raise
"""


def test_a_cable_can_be_plugged_out_and_in(bed):
    serve = "import socket; s = socket.create_server(('', 4000)); print('up', flush=True); s.accept(); input()"
    with subprocess.Popen([*via("hostb"), sys.executable, "-c", serve], stdin=-1, stdout=-1, text=True) as server:
        try:
            assert server.stdout.readline() == "up\n"
            bed.link("hostb", up=False)
            with pytest.raises(subprocess.CalledProcessError):
                _on("hosta", sys.executable, "-c", ASK, "0")
            bed.link("hostb", up=True)
            _on("hosta", sys.executable, "-c", ASK, "20")
        finally:
            server.kill()


def test_the_machine_is_reached_at_the_bridge(bed):
    with socket.create_server((bed.address, 0)) as server:
        _on("hostc", sys.executable, "-c", f"import socket; socket.create_connection({server.getsockname()!r}, 5)")


def test_what_runs_on_a_host_ends_with_it(bed):
    from bed import Bed

    name = "muxgone"
    with Bed(name, "10.79.0") as other:
        other.make(["alone"])
        with subprocess.Popen([*other.enter("alone"), "sleep", "600"]) as left:
            other.unmake()
            assert left.wait(10) != 0
    assert not Path(f"/run/verl_mux_bed/{name}.json").exists()
    assert f"{name}-br" not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


WITHOUT_ROOT = """
import os, runpy, sys
os.geteuid = lambda: 1000
sys.argv = [sys.argv[1], "make", "a"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_without_root_it_says_so(python):
    done = python("-c", WITHOUT_ROOT, str(EXAMPLE / "bed.py"))
    assert done.returncode == 2 and "needs Linux and root" in done.stderr
