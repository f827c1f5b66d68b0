"""Where and when a process runs, as setting the wall clock does not change it: boot, seconds since then, PID namespace."""

from __future__ import annotations

import os
import time
from pathlib import Path


def boot_id() -> str:
    """Empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_space() -> str:
    """Names the PID namespace of this process on this machine: containers with process ids of their own have others. Empty where
    the kernel does not say."""
    try:
        return os.readlink("/proc/self/ns/pid").removeprefix("pid:").strip("[]")
    except OSError:
        return ""


def seconds() -> float:
    """Goes on while the machine sleeps, and is the same in all processes of one boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
