"""Plugin of a verl that lacks our package: the CPU as a device, and nothing else of ours, which it refuses to import."""

import importlib.abc
import sys

_PLATFORM = {
    "verl.plugin.platform.platform_manager": "verl_mux.platform.verl_cpu",
    "verl.utils.distributed": "verl_mux.platform.verl_distributed",
    "verl.workers.engine": "verl_mux.platform.verl_engine",
    "verl.workers.rollout.base": "verl_mux.rollout.engine.sglang.on_cpu",
}
_PACKAGES = ("verl_mux", "verl_mux.rollout", "verl_mux.rollout.engine", "verl_mux.rollout.engine.sglang")
_ALLOWED = (
    *_PACKAGES,
    *("verl_mux.errors", "verl_mux.post_import", "verl_mux.rollout.engine.sglang.kernel_placeholders"),
    *("verl_mux.rollout.engine.sglang.on_cpu", "verl_mux.rollout.engine.sglang.cpu_server_adapter"),
)


class _Fence(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path, target=None):
        if fullname.startswith("verl_mux") and fullname not in _ALLOWED and not fullname.startswith("verl_mux.platform"):
            raise ImportError(f"{fullname} is not here")
        return


sys.meta_path.insert(0, _Fence())

from verl_mux.platform import choose  # noqa: E402
from verl_mux.post_import import after_import  # noqa: E402

assert choose.take_cpu_platform()
for upstream, ours in _PLATFORM.items():
    after_import(upstream, ours)


def activate() -> None:
    from verl_mux.rollout.engine.sglang import kernel_placeholders

    kernel_placeholders.install()
