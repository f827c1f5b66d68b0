"""Read a composed verl configuration, as `--cfg job` prints it, by dotted paths. Called by placement, the certificate and the
plan command; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_mux.errors import UserError

_MOST = 10**12


def at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """What stands there; `default` where nothing does, or null."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or value.get(key) is None:
            return default
        value = value[key]
    return value


def section(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The keys that stand there; none where nothing does. Raises UserError."""
    value = at(config, path, {})
    if not isinstance(value, Mapping):
        raise UserError(f"{path} is {value!r}; keys are needed there")
    return value


def count(config: Mapping[str, Any], path: str, purpose: str, default: int | None = None) -> int:
    """A whole number of 1 or more. `purpose`: what it is needed for, in words. Raises UserError."""
    value = at(config, path, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise UserError(f"{path} is {value!r}; a number of 1 or more{_beyond(value)} is needed {purpose}")
    return value


def _beyond(value: object) -> str:
    return f" and at most {_MOST}" if isinstance(value, int) and value > _MOST else ""
