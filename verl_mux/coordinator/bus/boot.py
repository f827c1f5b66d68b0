"""Time and names that setting the wall clock does not move: seconds since this machine booted, and which boot that was."""

from __future__ import annotations

import time
from pathlib import Path


def boot_id() -> str:
    """Empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def seconds() -> float:
    """Goes on while the machine sleeps, and is the same in all processes of one boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
