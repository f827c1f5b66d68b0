"""What is wrong in a file that a person wrote is said in one line."""

import msgspec
import pytest

from verl_mux.errors import UserError
from verl_mux.yaml_file import allowed_keys, read_yaml


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
    ("given", "hint"), [({"part": []}, "; allowed: parts"), ({"parts": [{"sise": 2}]}, "; allowed: size"), ({"parts": 3}, "")]
)
def test_an_unknown_key_is_followed_by_those_that_are_allowed_there(given, hint):
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(given, Outer)
    assert allowed_keys(error.value, {".parts": Inner}, Outer) == hint
