"""The dynamic linker finds the CUDA runtime that torch takes, and flash-attn 2 is told from flash-attn 4 and from what a hub has.
The installed packages are real; what a hub's cache holds is made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verl_mux.platform import cuda_packages


@pytest.fixture
def saver() -> Path:
    return cuda_packages.saver_library() or pytest.skip("torch_memory_saver or torch with CUDA is not installed")


def test_the_linker_takes_the_runtime_that_torch_takes(saver):
    environment = cuda_packages.with_torchs_runtime({"LD_LIBRARY_PATH": "/theirs"})
    if not environment:
        pytest.skip("torch's CUDA runtime is not from pip")
    folder, theirs = environment["LD_LIBRARY_PATH"].split(os.pathsep)
    assert theirs == "/theirs" and "nvidia" in folder
    assert cuda_packages.with_torchs_runtime({})["LD_LIBRARY_PATH"] == folder
    assert f"=> {folder}/libcudart.so" in cuda_packages.linked(saver, {**os.environ, **environment})


def test_without_pips_runtime_the_linker_is_left_alone(monkeypatch):
    monkeypatch.setattr(cuda_packages, "torch_cuda", lambda: (1, 0))  # no package has that one
    assert cuda_packages.with_torchs_runtime({"LD_LIBRARY_PATH": "/theirs"}) == {} and cuda_packages.saver_library() is None


def test_flash_attention_4_is_not_taken_for_2(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name, found in (("flash_attn_4-4.0.0", False), ("flash_attn-2.8.3", True)):
        (tmp_path / f"{name}.dist-info").mkdir()
        package, _, version = name.partition("-")
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
        assert cuda_packages.has_flash_attention() is found


def test_a_substitute_is_at_hand_once_it_is_in_the_hubs_cache(tmp_path, monkeypatch):
    kernels = pytest.importorskip("kernels")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not cuda_packages.hub_has_flash_attention()
    cached, commit = tmp_path / "models--kernels-community--flash-attn2", "1" * 40
    built = cached / "snapshots" / commit / "build" / kernels.utils.build_variants()[0]
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    built.mkdir(parents=True)
    (built / "__init__.py").touch()
    assert cuda_packages.hub_has_flash_attention()
