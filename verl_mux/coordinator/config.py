"""Reads the coordinator's configuration, from YAML or a plain mapping, into `core/settings.py`'s structs.

Runs in the coordinator and in commands that read its file; it opens that file alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.coordinator.core.settings import MODES, Config, Node, PlacementConfig, Pool, Segment, check
from verl_mux.errors import UserError
from verl_mux.yaml_file import allowed_keys, read_yaml

_KINDS = {".nodes[": Node, ".pools[": Pool, ".schedule[": Segment, ".placement": PlacementConfig}


def make_config(given: Mapping[str, Any]) -> Config:
    """Checks a plain mapping, as YAML gives it. Raises UserError with the key, what was given and what is allowed."""
    if given.get("placement") == "scheduler":
        given = {**given, "placement": {}}
    try:
        config = msgspec.convert(given, Config)
    except msgspec.ValidationError as error:
        raise UserError(f"coordinator configuration: {_in_words(error, given)}{_allowed(error)}") from error
    check(config)
    return config


def _in_words(error: msgspec.ValidationError, given: Mapping[str, Any]) -> str:
    """msgspec's words, with the name of the pool (msgspec writes `pools[...]`) and with what was given there."""
    words = str(error)
    for name, pool in given["pools"].items() if "$.pools[...]" in words else ():
        try:
            msgspec.convert({**given, "pools": {name: pool}}, Config)
        except msgspec.ValidationError as same:
            if str(same) == words:
                words = words.replace("pools[...]", f"pools.{name}")
                break
    where = re.fullmatch(r".*`\$\.([^`]*)`", words)
    value: Any = given
    for step in re.findall(r"[^.\[\]]+", where[1]) if where else ():
        value = value[int(step)] if isinstance(value, list) else value.get(step, {})
    said = ", got `" in words or value is given or isinstance(value, (dict, list))
    return words if said else f"{words}, given: {value!r}"


def _allowed(error: msgspec.ValidationError) -> str:
    """What may stand where msgspec says only what may not."""
    text = str(error)
    if ".schedule" in text and "enum" in text:
        return f"; allowed modes: {', '.join(MODES)}"
    if text.endswith("`$.placement`") and "unknown field" not in text:
        return "; allowed: `scheduler`, or a mapping of its keys"
    return allowed_keys(error, _KINDS, Config)


def read_config(path: str | Path) -> Config:
    """Reads a YAML file whose top level is the configuration itself, or has it under `coordinator`."""
    given = read_yaml(path)
    if not isinstance(given, dict):
        raise UserError(f"{path} holds no mapping; expected at least `pools:`")
    return make_config(given.get("coordinator", given))
