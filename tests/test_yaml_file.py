"""What is wrong in a file that a person wrote is said in one line."""

import msgspec
import pytest

from verl_mux.errors import UserError
from verl_mux.yaml_file import Mistakes, read_as, read_yaml


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: int = 1


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    parts: list[Inner] = []


def test_a_file_is_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: [1, {b: 2}]\n")
    assert read_yaml(path) == {"a": [1, {"b": 2}]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: 'a' stands twice"),
        ("a: {b: 1, b: 2}", "'b' stands twice"),
        ("a: [", "is not YAML"),
        ("a: 2001-13-45", "is not YAML: month must be in 1..12"),
        ("[" * 10_000, "is not YAML"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(tmp_path, text, words):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_yaml(path)
    assert str(path) in str(error.value) and words in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot read .*none.yaml: No such file"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "parts:\n- size: x\n- 3",
            "line 2: Expected `int`, got `str` - at `$.parts[0].size`; line 3: Expected `object`, got `int`",
        ),
        ("part: []", "line 1: unknown field `part`; did you mean `parts`? allowed: parts"),
        ("parts:\n- size: 1\n- sise: 2", "line 3: unknown field `sise` in parts[1]; did you mean `size`? allowed: size"),
        ("zzz: 1\nparts: [{}, {y: 1}]", "line 1: unknown field `zzz`; allowed: parts; line 2: unknown field `y` in parts[1]"),
    ],
)
def test_every_unknown_key_is_named_with_its_line_and_what_it_may_stand_for(tmp_path, text, words):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(Mistakes) as error:
        read_as(read_yaml(path), Outer)
    assert str(error.value.in_file(path)).startswith(f"{path}: {words}")


def test_a_place_that_only_the_other_file_has_is_looked_for_there(tmp_path):
    (tmp_path / "a.yaml").write_text("b: 1\n")
    (tmp_path / "base.yaml").write_text("\n\nparts: {big: 3}\n")
    mistakes = Mistakes([(("parts", "big"), "too big"), (("else",), "missing")])
    assert str(mistakes.in_file(tmp_path / "a.yaml", tmp_path / "base.yaml")).endswith("a.yaml: line 3: too big; missing")
