"""Run our checks before verl's `validate_config`.

plugin.py has it imported right after `verl.utils.config`, in every process that imports verl; the rest of ours is imported when a
config is validated and not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import verl.utils.config as verl_config

if TYPE_CHECKING:
    from omegaconf import DictConfig


def checked_first(validate_config: Callable) -> Callable:
    """`validate_config`, after our own checks."""

    @functools.wraps(validate_config)
    def checked(config: DictConfig, *args: Any, **kwargs: Any) -> Any:
        from verl_mux.config.preflight import check_job

        check_job(config)
        return validate_config(config, *args, **kwargs)

    vars(checked)["verl_mux"] = True
    return checked


if not getattr(verl_config.validate_config, "verl_mux", False):
    verl_config.validate_config = checked_first(verl_config.validate_config)
