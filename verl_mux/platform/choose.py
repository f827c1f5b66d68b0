"""When is the CPU platform active? On a machine with an accelerator only if VERL_PLATFORM=cpu asks for it.

Runs in every process that imports verl, and in the doctor and the agent; reads the environment and looks for device files.
Without that variable the CPU is taken where there is no accelerator, the command line asks for one of our trainer modes, and the
job will not join a Ray cluster: the driver of a GPU cluster often runs on a head node that has no GPU. Child processes inherit
the variable, so they agree with their parent.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_mux.errors import UserError

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/davinci_manager", "/dev/dxg")
_OUR_MODES = ("trainer_mode=mux_", "mux_ppo_trainer")
_ADDRESS = "ray_init.address="
# The group of entry points through which verl-mux-cpu comes in.
CPU_GROUP = "verl_mux_cpu"
CPU_PACKAGE_MISSING = (
    "no accelerator here, and verl-mux-cpu is not installed: `pip install ./verl_mux_cpu` in a checkout of verl_mux"
    " (VERL_PLATFORM names another platform)"
)

logger = logging.getLogger(__name__)


def accelerator_present() -> bool:
    """True where a driver of NVIDIA, AMD or Ascend has made its device file; asks no library, costs microseconds."""
    return any(Path(path).exists() for path in _DEVICE_FILES)


def cpu_platform_wanted(argv: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a process with this command line and environment, by default this one, should run on the CPU platform."""
    asked = environment.get("VERL_PLATFORM", "").strip().lower()
    if asked:
        return asked == "cpu"
    words = sys.argv if argv is None else argv
    if accelerator_present() or not any(mark in word for word in words for mark in _OUR_MODES):
        return False
    if (cluster := joined_cluster(words)) is not None:
        logger.info("no accelerator here, but the Ray cluster at %s is taken to have some (VERL_PLATFORM=cpu if not)", cluster)
    return cluster is None


def joined_cluster(words: list[str]) -> str | None:
    """The address of the Ray cluster that a driver with this command line joins; None: it starts one of its own.

    Named, or else the one that `ray start` on this machine began, which `ray.init()` takes by itself.
    """
    given = [word.partition(_ADDRESS)[2] for word in words if _ADDRESS in word]
    for named in (given[-1] if given else "", os.environ.get("RAY_ADDRESS", "")):
        if named not in ("", "null", "auto"):
            return None if named == "local" else named
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


def cpu_package_missing() -> bool:
    """Whether verl-mux-cpu is not installed in this Python."""
    return not _cpu_parts()


def cpu_part(name: str) -> Any:
    """What verl-mux-cpu registers under `name`: an entry point in verl_mux_cpu/pyproject.toml.

    Raises UserError where it is not installed.
    """
    if (entry := _cpu_parts().get(name)) is None:
        raise UserError(CPU_PACKAGE_MISSING)
    return entry.load()


@functools.cache
def _cpu_parts() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=CPU_GROUP)}
