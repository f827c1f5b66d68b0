"""Lets SGLang be imported where its CUDA kernels cannot load.

SGLang imports names from `sgl_kernel` on every device, even with SGLANG_USE_CPU_ENGINE=1, and that package needs libcuda. This
finder answers with modules whose attributes can be imported but raise when called: on the CPU path none of them is. `flashinfer`
loads, and takes a sixth of all that an engine imports, but SGLang goes on without it: here it is not there. Runs in every process
that imports SGLang; called by plugin.py; touches sys.meta_path.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

_STOOD_FOR, _LEFT_OUT = "sgl_kernel", "flashinfer"


class _Placeholder:
    """Stands for a CUDA kernel: importable, not callable."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} is a CUDA kernel and there is no GPU here")


class _PlaceholderModule(ModuleType):
    __getattr__ = _Placeholder.__getattr__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path, target=None):
        if fullname.partition(".")[0] not in (_STOOD_FOR, _LEFT_OUT):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _LEFT_OUT:
            raise ModuleNotFoundError(f"{_LEFT_OUT} needs a GPU", name=_LEFT_OUT)
        module.__path__ = []


_finder = _Finder()


def install() -> None:
    """Answer imports of both from now on, in this process. Idempotent."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
