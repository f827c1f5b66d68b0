"""Reads the coordinator's configuration, from YAML or a plain mapping, into `core/settings.py`'s structs.

Runs in the coordinator and in commands that read its file; it opens that file alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_mux.coordinator.core.settings import Config, check
from verl_mux.errors import UserError
from verl_mux.yaml_file import Mistakes, read_as, read_yaml


def make_config(given: Mapping[str, Any]) -> Config:
    """Checks a plain mapping, as YAML gives it. Raises Mistakes with the key, what was given and what is allowed, and UserError
    for parts that do not go together."""
    if isinstance(name := given.get("placement"), str):
        if name != "scheduler":
            raise Mistakes([(("placement",), f"placement is {name!r}; allowed: `scheduler`, or a mapping of its keys")])
        given = {**given, "placement": {}}
    try:
        config = read_as(given, Config)
    except Mistakes as mistakes:
        raise Mistakes([(at, f"coordinator configuration: {text}") for at, text in mistakes.each]) from None
    check(config)
    return config


def read_config(path: str | Path) -> Config:
    """Reads a YAML file whose top level is the configuration itself, or has it under `coordinator`."""
    given = read_yaml(path)
    if not isinstance(given, dict):
        raise UserError(f"{path} holds no mapping; expected at least `pools:`")
    try:
        return make_config(given.get("coordinator", given))
    except Mistakes as mistakes:
        raise mistakes.in_file(Path(path), under=("coordinator",) if "coordinator" in given else ()) from None
