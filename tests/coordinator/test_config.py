"""What a coordinator's YAML may say, and the line that refuses the rest."""

import re
import types
import typing
from pathlib import Path

import msgspec
import pytest
import yaml

from verl_mux.coordinator.config import make_config, read_config
from verl_mux.coordinator.core.settings import MODES, Config, Node, PlacementConfig, Pool, Segment
from verl_mux.errors import UserError

POOLS = {"rollout": {"nodes": [{"name": "r0"}]}}


def test_a_file_is_read_with_defaults_for_what_it_leaves_out(tmp_path):
    path = tmp_path / "mux.yaml"
    path.write_text("pools:\n  rollout: {nodes: [{name: r0, gpus: 8, cpus: [0, 1], usd_per_hour: 14.8}]}\nlease_timeout: 7\n")
    config = read_config(path)
    assert (config.node("r0").gpus, config.node("r0").cpus, config.node("r0").device_bytes) == (8, [0, 1], None)
    assert [segment.mode for segment in config.schedule] == ["interleaved"]
    assert (config.lease_timeout, config.expect_jobs, config.kill, config.remote_grace) == (7, 0, True, None)


def test_the_configuration_may_lie_under_coordinator(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("coordinator: {pools: {p: {nodes: [{name: n}]}}}\njobs: {}\n")
    assert read_config(path).describe_pools() == "p (n)"


PLACED = {side: {"kind": "H20", "nodes": [{"name": side[0]}]} for side in ("rollout", "train")}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "missing required field `pools`"),
        ({"pools": POOLS, "pool": 1}, "unknown field `pool`; did you mean `pools`. allowed: pools, schedule"),
        (
            {"pools": POOLS, "placement": {"slos": 1}},
            "unknown field `slos` in placement; did you mean `slo`. allowed: rollout, train, slo",
        ),
        ({"pools": POOLS, "placement": "schedule"}, "allowed: `scheduler`, or a mapping"),
        (
            {"pools": {"p": {"nodes": [{"name": "n", "gpu": 1}]}}},
            r"unknown field `gpu` in pools.p.nodes\[0\]; did you mean `gpus`",
        ),
        ({"pools": {"p": {"nodes": ["n"]}}}, r"got `str` - at `\$.pools.*nodes\[0\]`; allowed: a mapping of name, host"),
        ({"pools": {}}, r"of length >= 1 - at `\$.pools`"),
        ({"pools": {**POOLS, "p": {"nodes": []}}}, r"of length >= 1 - at `\$.pools.p.nodes`"),
        ({"pools": {"p": {"nodes": [{"name": "n"}, {"name": "n"}]}}}, "node 'n' is named twice"),
        ({"pools": {"p": {"nodes": [{"name": "q"}]}, "q": {"nodes": [{"name": "n"}]}}}, "'q' names both a pool and"),
        ({"pools": {**POOLS, "p": {"nodes": [{"name": "n", "gpus": -1}]}}}, r">= 0 - at `\$.pools.p.nodes\[0\].gpus`, given: -1"),
        (
            {"pools": {"p": {"nodes": [{"name": "n", "host": "h"}, {"name": "m", "host": "h", "gpu_ids": [1]}]}}},
            "nodes 'n' and 'm' share GPUs of host 'h'",
        ),
        ({"pools": {"p": {"nodes": [{"name": "n", "host": "h", "gpu_ids": [0, 0], "gpus": 2}]}}}, r"gpu_ids \[0, 0\]; as many"),
        ({"pools": {"p": {"nodes": [{"name": "n", "gpu_ids": [0]}]}}}, "and a host"),
        ({"pools": POOLS, "schedule": []}, r"of length >= 1 - at `\$.schedule`"),
        ({"pools": POOLS, "schedule": [{"mode": "random"}]}, "'random'.*allowed: sequential, uncoordinated, interleaved"),
        (
            {"pools": POOLS, "schedule": [{"mode": "sequential"}, {"mode": "interleaved"}]},
            r"schedule entry 1 \(sequential\) has steps None",
        ),
        ({"pools": POOLS, "schedule": [{"mode": "sequential", "steps": 0}]}, r">= 1 - at `\$.schedule\[0\].steps`, given: 0"),
        ({"pools": POOLS, "expect_jobs": -1}, r">= 0 - at `\$.expect_jobs`, given: -1"),
        ({"pools": POOLS, "lease_timeout": 1}, r"> 1.0 - at `\$.lease_timeout`, given: 1"),
        *(
            ({"pools": POOLS, key: value}, rf"Expected `float.*[<>].* - at `\$.{key}`, given: {value}")
            for key in ("lease_timeout", "kill_grace", "remote_grace")
            for value in (float("nan"), float("inf"))
        ),
        *(
            ({"pools": POOLS, key: 1}, f"unknown field `{key}`; .*allowed: pools, schedule, expect_jobs")
            for key in ("hung_factor", "filler_grace", "silent_timeout", "evict_to_disk_after", "shares", "on_nodes_wanted")
        ),
        ({"pools": {"p": {"nodes": [{"name": "n", "gpus": 10**20}]}}}, "<= 10000.*given: 1000"),
        ({"pools": {"p": {"nodes": [{"name": "n", "cpus": [-1]}]}}}, r">= 0 - at `\$.pools.p.nodes\[0\].cpus\[0\]`, given: -1"),
        (
            {"pools": {"p": {"nodes": [{"name": "n", "host_bytes": -1}]}}},
            ">= 0 - at .*host_bytes`, given: -1",
        ),
        (
            {"pools": {"p": {"nodes": [{"name": "n", "usd_per_hour": float("nan")}]}}},
            r">= 0.0 - at `\$.pools.p.nodes\[0\].usd_per_hour`, given: nan",
        ),
        ({"pools": PLACED, "placement": {"slo": float("nan")}}, r">= 1.0 - at `\$.placement.slo`, given: nan"),
    ],
)
def test_bad_values_are_refused_by_name(given, words):
    with pytest.raises(UserError, match=words):
        make_config(given)


@pytest.mark.parametrize(("text", "words"), [("- 1", "holds no mapping"), ("a: [", "is not YAML")])
def test_a_file_that_is_no_mapping_is_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as error:
        read_config(path)
    assert "\n" not in str(error.value)


# --- docs/coordinator.md says what the code does ---

DOC = (Path(__file__).parents[2] / "docs" / "coordinator.md").read_text()
STRUCTS = {
    "## Keys of the file": Config,
    "### A pool": Pool,
    "### A node": Node,
    "### An entry of `schedule`": Segment,
    "### `placement`": PlacementConfig,
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
