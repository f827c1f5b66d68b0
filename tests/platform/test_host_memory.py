"""What a process holds of its host's memory: its own pages, its part of shared ones, and no file's."""

import mmap
import os
import subprocess
import sys
from multiprocessing import shared_memory

from verl_mux.platform.host_memory import process_bytes

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
