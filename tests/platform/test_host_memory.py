"""What a process holds of its host's memory: its own pages, its part of shared ones, and no file's."""

import mmap
import os
import subprocess
import sys
from multiprocessing import shared_memory

import psutil
import pytest

from verl_mux.platform.host_memory import process_bytes, room

MIB = 2**20
SIZE = 64 * MIB


def test_pages_of_its_own_count_and_those_of_files_do_not(tmp_path):
    before = process_bytes()
    block = bytearray(b"x" * SIZE)
    held = process_bytes()
    assert abs(held["private"] - before["private"] - SIZE) < 8 * MIB
    del block
    (tmp_path / "file").write_bytes(b"x" * SIZE)
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sum(mapped[:: mmap.PAGESIZE])
        assert process_bytes()["private"] - before["private"] < 8 * MIB
        assert process_bytes()["shared"] - before["shared"] < 8 * MIB


def test_shared_pages_count_in_parts_that_add_up():
    before = process_bytes()["shared"]
    shared = shared_memory.SharedMemory(create=True, size=SIZE)
    try:
        shared.buf[:] = b"x" * SIZE
        assert abs(process_bytes()["shared"] - before - SIZE) < MIB
        script = (
            "import sys; from multiprocessing import shared_memory, resource_tracker\n"
            "block = shared_memory.SharedMemory(sys.argv[1]); resource_tracker.unregister(block._name, 'shared_memory')\n"
            "sum(block.buf[::4096]); print('there', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", script, shared.name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout.readline() == "there\n"
            mine, theirs = process_bytes()["shared"] - before, process_bytes(other.pid)["shared"]
            assert abs(mine - SIZE / 2) < MIB and abs(theirs - SIZE / 2) < MIB
            other.stdin.close()
    finally:
        shared.close()
        shared.unlink()


def test_of_a_process_that_is_gone_nothing_is_known():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process_bytes(child.pid) == {}
    assert process_bytes(os.getpid()).keys() == {"private", "shared"}


# Files of control groups as Linux shows them: 100 MiB of 300 are used, 40 of them by pages of files.
V2 = {"max": "314572800", "current": "104857600", "stat": "anon 1\ninactive_file 20971520\nactive_file 20971520\n"}
V1 = {
    "limit_in_bytes": "314572800", "usage_in_bytes": "104857600",
    "stat": "total_rss 1\ntotal_inactive_file 20971520\ntotal_active_file 20971520\n",
}  # fmt: skip


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


@pytest.fixture
def host(tmp_path):
    """Makes /proc/self/cgroup, and gives what `room` finds."""

    def find(lines):
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(lines)
        return room(tmp_path / "proc", tmp_path / "cgroup")

    return find


@pytest.mark.parametrize(
    ("lines", "folder", "files"),
    [
        ("0::/\n", "", V2),
        ("0::/pod/job\n", "pod/job", V2),
        ("0::/pod/job\n", "pod", V2),
        ("0::/not/seen/from/here\n", "", V2),
        ("5:cpu,cpuacct:/x\n4:memory:/docker/1\n", "memory/docker/1", V1),
        ("4:memory:/docker/of-the-host\n", "memory", V1),
        ("4:memory:/docker/1\n0::/docker/1\n", "memory/docker/1", V1),
    ],
)
def test_the_limit_of_a_control_group_counts_less_what_can_be_taken_back(host, tmp_path, lines, folder, files):
    write(tmp_path / "cgroup" / folder, files)
    assert host(lines) == (300 * MIB, 240 * MIB, str(tmp_path / "cgroup" / folder))


def test_the_tightest_of_several_groups_counts_and_one_without_a_limit_does_not(host, tmp_path):
    write(tmp_path / "cgroup" / "pod", {**V2, "max": str(200 * MIB)})
    write(tmp_path / "cgroup" / "pod" / "job", {**V2, "max": "max"})
    assert host("0::/pod/job\n") == (200 * MIB, 140 * MIB, str(tmp_path / "cgroup" / "pod"))


@pytest.mark.parametrize("lines", ["", "0::/\n", "4:memory:/\n"])
def test_without_a_limit_it_is_the_machines_memory(host, tmp_path, lines):
    write(tmp_path / "cgroup" / "memory", {**V1, "limit_in_bytes": str(2**63 - 4096)})
    assert host(lines)[::2] == (psutil.virtual_memory().total, "the machine")
