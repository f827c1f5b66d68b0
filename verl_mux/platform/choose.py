"""When is the CPU platform active? On a machine with an accelerator only if VERL_PLATFORM=cpu asks for it.

Without that variable it is taken where there is no accelerator, the command line asks for one of our trainer modes, and no Ray
cluster is named: the driver of a GPU cluster often runs on a head node that has none. verl's and the engine's child processes
inherit the variable, so they agree with their parent.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/davinci_manager", "/dev/dxg")
_OUR_MODES = ("trainer_mode=mux_", "mux_ppo_trainer")
_A_CLUSTER = "ray_init.address="

logger = logging.getLogger(__name__)


def accelerator_present() -> bool:
    """True where a driver of NVIDIA, AMD or Ascend has made its device file; asks no library, costs microseconds."""
    return any(Path(path).exists() for path in _DEVICE_FILES)


def cpu_platform_wanted(argv: list[str] | None = None) -> bool:
    """Whether this process, or the parent it inherits its environment from, should run on the CPU platform."""
    asked = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if asked:
        return asked == "cpu"
    words = sys.argv if argv is None else argv
    ours = any(mark in word for word in words for mark in _OUR_MODES)
    cluster = os.environ.get("RAY_ADDRESS") or any(_A_CLUSTER in word for word in words)
    return ours and not cluster and not accelerator_present()


def take_cpu_platform() -> bool:
    """Where the CPU platform is wanted, make this process and its children use it. Says whether."""
    wanted = cpu_platform_wanted()
    if wanted and not os.environ.get("VERL_PLATFORM"):
        logger.warning("no accelerator here: verl and its engine run on the CPU (set VERL_PLATFORM to choose another platform)")
    if wanted:
        os.environ["VERL_PLATFORM"] = "cpu"
    return wanted
