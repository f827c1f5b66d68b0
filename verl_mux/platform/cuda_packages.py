"""What of the Python packages a GPU job stands on: torch's CUDA, the library that torch_memory_saver puts before an engine's
schedulers, and flash-attn.

Runs in the driver (config/job_checks.py), in engine servers (rollout/engine/sglang/server.py) and on the command line
(launcher/doctor_gpu.py). Reads files of packages, imports neither torch nor transformers; may ask a hub.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FLASH_ATTENTION = "flash_attention_2"
# What transformers takes in its place, by the package `kernels`.
SUBSTITUTE = "kernels-community/flash-attn2"


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that torch is built for; None: no torch, or one without CUDA."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    text = (Path(torch.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda\b.*=\s*'(\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def saver_library() -> Path | None:
    """What SGLang puts into LD_PRELOAD of its schedulers: torch_memory_saver's library for torch's CUDA. None: not installed."""
    saver, cuda = importlib.util.find_spec("torch_memory_saver"), torch_cuda()
    if saver is None or saver.origin is None or cuda is None:
        return None
    name = f"torch_memory_saver_hook_mode_preload_cu{cuda[0]}.*.so"
    return next((file for folder in Path(saver.origin).parents[:2] for file in folder.glob(name)), None)


def with_torchs_runtime(environment: Mapping[str, str]) -> dict[str, str]:
    """LD_LIBRARY_PATH with the folder of pip's CUDA runtime in front; empty where torch's is not from pip.

    torch finds that folder by itself; the linker, which resolves LD_PRELOAD before Python runs, does not: a process then ends
    with exit code 127, or takes the version of a toolkit on this host, and torch with it."""
    nvidia, cuda = importlib.util.find_spec("nvidia"), torch_cuda()
    if nvidia is None or cuda is None:
        return {}
    places = map(Path, nvidia.submodule_search_locations or ())
    found = next((file.parent for place in places for file in place.glob(f"*/lib/libcudart.so.{cuda[0]}")), None)
    folders = [str(found), environment.get("LD_LIBRARY_PATH")]
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))} if found else {}


def linked(library: Path, environment: Mapping[str, str]) -> str:
    """The dynamic linker's list of what this interpreter loads with that library in LD_PRELOAD; runs no Python."""
    traced = {**environment, "LD_PRELOAD": str(library), "LD_TRACE_LOADED_OBJECTS": "1"}
    return subprocess.run([sys.executable], env=traced, capture_output=True, text=True, check=False).stdout


def has_flash_attention() -> bool:
    """Whether flash-attn 2 is installed. flash-attn 4, which SGLang brings, has a module of the same name, and transformers does
    not take it for this one."""
    return any(importlib.metadata.distributions(name="flash-attn"))


def hub_has_flash_attention() -> bool:
    """Whether transformers can have flash-attn 2's substitute: it is in the hub's cache, or on a hub that answers."""
    try:
        import httpx
        from kernels import has_kernel, install_kernel
    except ImportError:
        return False
    try:
        install_kernel(SUBSTITUTE, "main", local_files_only=True)
        return True
    except (OSError, ValueError):
        pass
    try:
        return has_kernel(SUBSTITUTE)
    except (OSError, ValueError, httpx.HTTPError):
        return False
