"""Weights on their way through shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

from verl_mux.sync.shared_memory import folder, remove_orphans


def test_a_folder_is_there_for_the_block_only(tmp_path):
    with folder(tmp_path) as path:
        (path / "model.safetensors").write_text("weights")
    assert not list(tmp_path.iterdir())


def test_what_a_dead_process_left_is_removed_and_nothing_else(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f"verl_mux_{dead.pid}_a", f"verl_mux_{os.getpid()}_b", "verl_mux_notes", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    remove_orphans(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names[1:])
