"""Plugin of a verl that lacks our package: the CPU as a device, and nothing else of ours, which it refuses to import."""

import importlib.abc
import sys

# What the package verl_mux_cpu imports of verl_mux to make the CPU a device of verl's.
_ALLOWED = ("verl_mux", "verl_mux.errors", "verl_mux.post_import")


class _Fence(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path, target=None):
        known = fullname in _ALLOWED or fullname.startswith("verl_mux.platform") or fullname.partition(".")[0] == "verl_mux_cpu"
        if fullname.startswith("verl_mux") and not known:
            raise ImportError(f"{fullname} is not here")
        return


sys.meta_path.insert(0, _Fence())

from verl_mux_cpu import plugin  # noqa: E402
from verl_mux_cpu.plugin import activate  # noqa: E402, F401

assert plugin.take_cpu_platform()
