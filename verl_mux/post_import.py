"""Import one module right after another one is imported, without importing either now.

verl's `register_trainer` needs the class, and the class needs verl's whole trainer stack (seconds). A finder at the front of
`sys.meta_path` lets the plugin wait until the program imports that stack anyway.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
import threading
from types import ModuleType

logger = logging.getLogger(__name__)


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then imports the follower."""

    def __init__(self, inner: importlib.abc.Loader, follower: str) -> None:
        self._inner = inner
        self._follower = follower

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        # Reloads, pickles and resource readers meet the real loader from here on.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        try:
            importlib.import_module(self._follower)
        except Exception:
            # The program that imports the upstream module may not want verl_mux at all: say it, and let it go on.
            logger.exception("%s could not be loaded; what it registers stays unknown", self._follower)

    def __getattr__(self, name: str):
        # runpy, inspect and importlib.resources ask the loader for get_code, get_source, is_package, ...
        return getattr(self._inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.followers: dict[str, str] = {}
        self._asking = threading.local()

    def find_spec(self, fullname: str, path, target=None):
        follower = self.followers.get(fullname)
        # Many ask for a spec and never import; the others on sys.meta_path, asked below, ask us once more.
        if follower is None or getattr(self._asking, "name", None) == fullname:
            return None
        self._asking.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, follower)
        return spec


_finder = _Finder()


def after_import(upstream: str, follower: str) -> None:
    """Import `follower` once `upstream` has been imported; at once if it has been already."""
    if upstream in sys.modules:
        importlib.import_module(follower)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.followers[upstream] = follower
