"""Reading a composed verl configuration, as `--cfg job` prints it, by dotted paths. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_mux.errors import UserError


def at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """What stands there; `default` where nothing does, or null."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or value.get(key) is None:
            return default
        value = value[key]
    return value


def count(config: Mapping[str, Any], path: str, purpose: str, default: int | None = None) -> int:
    """A whole number of 1 or more. `purpose`: what it is needed for, in words. Raises UserError."""
    value = at(config, path, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path} is {value!r}; a number of 1 or more is needed {purpose}")
    return value
