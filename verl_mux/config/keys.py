"""From plain mappings to the structs that say what keys there are. A refusal is one line: key, value, what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from verl_mux.errors import UserError

_T = TypeVar("_T")
_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "str | None": "text or null",
    "int | None": "a whole number or null",
    "float | None": "a number or null",
    "list[str]": "a list of names",
    "tuple[int, int]": "two numbers, the lowest and the highest",
    "tuple[float, float]": "two numbers, the lowest and the highest",
}


def convert(given: Any, kind: type[_T], root: str) -> _T:
    """`given` as a struct of this kind, whose keys lie under `root`; "3" is a number too, as environment variables give it.

    Raises:
        UserError: an unknown key, a value of the wrong kind, or a number that is not finite.
    """
    check_keys(given, kind, root)
    return msgspec.convert(given, kind, strict=False)


def check_keys(given: Any, kind: type, path: str) -> None:
    """Raises what `convert` raises."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    if not isinstance(given, Mapping):
        raise UserError(f"{path} is {given!r}; it holds the keys {', '.join(fields)}")
    for key, value in given.items():
        if key not in fields:
            raise UserError(f"unknown key {path}.{key}; allowed here: {', '.join(fields)}")
        annotation = fields[key].type
        if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
            check_keys(value, annotation, f"{path}.{key}")
        else:
            _check_value(value, annotation, f"{path}.{key}")


def _check_value(value: Any, annotation: Any, path: str) -> None:
    try:
        converted = msgspec.convert(value, annotation, strict=False)
        if not isinstance(converted, float) or math.isfinite(converted):
            return
    except msgspec.ValidationError:
        pass
    name = annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    name = re.sub(r"\bNoneType\b", "None", name)
    raise UserError(f"{path} must be {_WORDS.get(name, name)}, given {value!r}; allowed: {name}")
