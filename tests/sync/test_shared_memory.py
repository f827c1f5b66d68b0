"""Weights on their way through shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from safetensors.torch import load_file

from verl_mux.sync.shared_memory import checkpoint, folder, remove_orphans


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


def test_a_checkpoint_is_what_an_engine_loads_and_gone_with_the_block(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = {"a.weight": torch.arange(6.0).reshape(2, 3)}
    with checkpoint(weights, model) as directory:
        assert torch.equal(load_file(directory / "model.safetensors")["a.weight"], weights["a.weight"])
        assert (directory / "config.json").read_text() == "{}"
    assert not directory.exists()
