"""YAML files that people write: read with one clear line for what is wrong in them. Called by commands and the coordinator."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from verl_mux.errors import UserError

# Keys and indices, the outermost first.
Place: TypeAlias = tuple[str | int, ...]
Mistake: TypeAlias = tuple[Place, str]
_T = TypeVar("_T")


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


class Mistakes(UserError):
    """All that is wrong in a file: pairs of the keys under which it stands, and what is wrong there."""

    def __init__(self, each: Sequence[Mistake]) -> None:
        super().__init__("; ".join(text for _, text in each))
        self.each = each

    def in_file(self, path: Path, *others: Path, under: Place = ()) -> UserError:
        """The same with the file's name and lines; what does not stand there may stand in the others."""
        lines = [next(filter(None, (_line(file, (*under, *at)) for file in (path, *others))), "") for at, _ in self.each]
        return UserError(f"{path}: {'; '.join(line + text for line, (_, text) in zip(lines, self.each, strict=True))}")


def read_as(given: Any, kind: type[_T]) -> _T:
    """What was read as a struct. Raises Mistakes: every key that it does not have, and every value of another kind."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        raise Mistakes(_mistakes(given, kind, ())) from None


def _mistakes(given: Any, kind: Any, at: Place) -> list[Mistake]:
    """Those of the innermost values; of the whole where each of its parts is as it should be."""
    if found := _within(given, kind, at):
        return found
    try:
        msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        was = "" if ", got `" in str(error) or isinstance(given, (dict, list)) else f", given: {given!r}"
        where = f" - at `${_words(at)}`" if at else ""
        parts = (kind, *get_args(kind))
        choices = ["a mapping"] * any(get_origin(part) is dict for part in parts[1:])
        choices += [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
        allowed = ", ".join(choices)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and not isinstance(given, dict):
            allowed = f"a mapping of {', '.join(kind.__struct_fields__)}"
        return [(at, f"{error}{where}{was}{allowed and f'; allowed: {allowed}'}")]
    return []


def _within(given: Any, kind: Any, at: Place) -> list[Mistake]:
    whole, parts = get_origin(kind), get_args(kind)
    if whole in (Union, UnionType, Annotated):
        return [it for part in parts for it in _within(given, part, at)]
    if whole is dict and isinstance(given, dict):
        return [it for key, value in given.items() for it in _mistakes(value, parts[1], (*at, key))]
    if whole is list and isinstance(given, list):
        return [it for index, value in enumerate(given) for it in _mistakes(value, parts[0], (*at, index))]
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(given, dict)):
        return []
    fields, found = {field.name: field.type for field in msgspec.structs.fields(kind)}, []
    names = [name for name in fields if name not in getattr(kind, "INTERNAL", ())]
    for key, value in given.items():
        if key in fields:
            found += _mistakes(value, fields[key], (*at, key))
            continue
        hints = [f"did you mean `{name}`?" for name in difflib.get_close_matches(str(key), names, n=1)]
        hints += [] if found else [f"allowed: {', '.join(names)}"]  # once for a mapping
        what = f"unknown field `{key}`{f' in {_words(at)[1:]}' if at else ''}"
        found.append(((*at, key), f"{what}; {' '.join(hints)}" if hints else what))
    return found


def _words(at: Place) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in at)


def _line(path: Path, at: Place) -> str:
    """`line N: ` of the innermost of these keys that stands in the file; nothing where the first of them does not."""
    with open(path, encoding="utf-8") as stream:
        node, line = yaml.compose(stream, Loader=yaml.SafeLoader), None
    for key in at:
        if isinstance(node, yaml.MappingNode):
            pairs = [(name, value) for name, value in node.value if name.value == str(key)]
        else:
            inside = isinstance(node, yaml.SequenceNode) and isinstance(key, int)
            pairs = [(value, value) for index, value in enumerate(node.value) if index == key] if inside else []
        if not pairs:
            break
        line, node = pairs[0][0].start_mark.line + 1, pairs[0][1]
    return f"line {line}: " if line else ""
