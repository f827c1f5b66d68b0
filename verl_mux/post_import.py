"""Import one module right after another one is imported, without importing either now.

Called by plugin.py (and verl_mux_cpu's) in every process that imports verl; sets a hook of wrapt's in front of `sys.meta_path`.
verl's `register_trainer` needs the class, and the class needs verl's whole trainer stack (seconds): the hook waits until the
program imports that stack anyway.
"""

from __future__ import annotations

import importlib
import logging

import wrapt

logger = logging.getLogger(__name__)


def after_import(upstream: str, follower: str) -> None:
    """Import `follower` once `upstream` has been imported; at once if it has been already."""

    def follow(_module: object) -> None:
        try:
            importlib.import_module(follower)
        except Exception:
            # The program that imports the upstream module may not want verl_mux at all: log the error and let it go on.
            logger.exception("%s could not be loaded; what it registers stays unknown", follower)

    wrapt.register_post_import_hook(follow, upstream)
