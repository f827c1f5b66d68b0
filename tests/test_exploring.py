"""Fixed examples are fixed."""

import importlib

from hypothesis import given, settings
from hypothesis import strategies as st


def test_which_examples_are_tried_does_not_depend_on_what_is_imported(tmp_path, monkeypatch):
    def drawn() -> list[int]:
        found = []

        @settings(derandomize=True, database=None, max_examples=200)
        @given(st.integers())
        def collect(number):
            found.append(number)

        collect()
        return found

    before = drawn()
    (tmp_path / "many_numbers.py").write_text(f"NUMBERS = {list(range(1000, 2000))}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("many_numbers")
    assert drawn() == before
