"""YAML files that people write: read with one clear line for what is wrong in them. Called by commands and the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from verl_mux.errors import UserError


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML lets a second key of one name replace the first; here it is an error."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict:
    seen = set()
    for key_node, _ in node.value:
        key = repr(loader.construct_object(key_node, deep=True))
        if key in seen:
            raise UserError(f"{loader.name}, line {key_node.start_mark.line + 1}: {key} stands twice; names are unique")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: str | Path) -> Any:
    """What the file holds. Raises UserError: no such file, not YAML, a key that stands twice."""
    try:
        with open(path, encoding="utf-8") as stream:
            return yaml.load(stream, Loader=_UniqueKeys)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no text, a date that is none, brackets without end
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def allowed_keys(error: msgspec.ValidationError, kinds: Mapping[str, type], top: type) -> str:
    """`; allowed: ...` for an unknown key, or for what should have been a mapping; else nothing.

    `kinds`: the struct that may stand where the error's path has this text, the innermost first; `top`: at the top level.
    """
    text = str(error)
    path = text.rpartition("$")[2]
    is_entry = "Expected `object`" in text and path.endswith("]`")
    if "unknown field" not in text and not is_entry:
        return ""
    kind = next((kind for part, kind in kinds.items() if part in path), top)
    keys = ", ".join(field.name for field in msgspec.structs.fields(kind))
    return f"; allowed: a mapping of {keys}" if is_entry else f"; allowed: {keys}"
