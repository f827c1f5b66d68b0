"""docs/coordinator.md says what the code does: every key with its type and default, and examples that are accepted."""

import re
import types
import typing
from pathlib import Path

import msgspec
import pytest
import yaml

from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core.settings import MODES, Config, Node, PlacementConfig, Pool, Segment
from verl_mux.placement.estimator import GpuKind

DOC = (Path(__file__).parents[2] / "docs" / "coordinator.md").read_text()
STRUCTS = {
    "## Keys of the file": Config,
    "### A pool": Pool,
    "### A node": Node,
    "### An entry of `schedule`": Segment,
    "### `placement`": PlacementConfig,
    "### A kind of GPU": GpuKind,
}
WORDS = {
    str: "text",
    typing.Union[str, list[str]]: "text or list of texts",  # noqa: UP007
    int: "integer",
    float: "number",
    bool: "true or false",
    list[int]: "list of integers",
    list[Node]: "list of nodes",
    list[Segment]: "list of entries",
    dict[str, Pool]: "pools by name",
    dict[str, GpuKind]: "kinds by name",
    PlacementConfig: "`scheduler` or a mapping",
    typing.Literal[MODES]: "`sequential`, `uncoordinated` or `interleaved`",
}


def rows(heading):
    """Cells of the heading's table, its two head lines left out."""
    section = re.split(r"^##+ ", DOC.split(f"{heading}\n")[1], flags=re.M)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def without_none(hint):
    """Nor what limits a type further."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = typing.Union[tuple(part for part in typing.get_args(hint) if part is not type(None))]  # noqa: UP007
    if typing.get_origin(hint) is typing.Annotated:
        return without_none(hint.__origin__)
    return list[without_none(typing.get_args(hint)[0])] if typing.get_origin(hint) is list else hint


def default_of(field):
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


@pytest.mark.parametrize(("heading", "struct"), STRUCTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_every_key_is_there_with_its_type_and_default(heading, struct):
    hints = typing.get_type_hints(struct)
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    documented = {key.strip("`"): (kind, default) for key, kind, default, *_ in rows(heading)}
    assert list(documented) == list(fields)
    for name, (kind, default) in documented.items():
        assert kind == WORDS[without_none(hints[name])], name
        if fields[name].required:
            assert default == "required", name
            continue
        given = None if default == "none" else yaml.safe_load(default.strip("`"))
        assert msgspec.convert(given, hints[name]) == default_of(fields[name]), name


@pytest.mark.parametrize(("heading", "struct"), STRUCTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_every_example_sets_its_own_key_to_something_allowed(heading, struct):
    hints = typing.get_type_hints(struct)
    for key, *_, example in rows(heading):
        given = yaml.safe_load(example.strip("`"))
        assert list(given) == [key.strip("`")]
        if given != {"placement": "scheduler"}:
            msgspec.convert(given[key.strip("`")], hints[key.strip("`")])


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", DOC, flags=re.S))
def test_the_whole_files_are_accepted(text):
    assert make_config(yaml.safe_load(text)).pools
