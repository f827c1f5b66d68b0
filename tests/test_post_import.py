"""Real packages on the path: the follower is imported right after the upstream module, whoever looks at it before."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import wrapt

from verl_mux.post_import import after_import


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Write a package `upstream` with a module `part` and a module `follower`; each notes its import in `upstream.seen`."""
    package = tmp_path / "upstream"
    package.mkdir()
    (package / "__init__.py").write_text("seen = ['upstream']\n")
    (package / "part.py").write_text("import upstream\nupstream.seen.append('part')\nvalue = 1\n")
    (tmp_path / "follower.py").write_text("import upstream\nfrom upstream.part import value\nupstream.seen.append('follower')\n")
    (tmp_path / "broken.py").write_text("import upstream\nupstream.seen.append('broken')\nraise OSError('no such library')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(wrapt.importer, "_post_import_hooks", {})
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("upstream", "follower", "broken"):
            del sys.modules[name]


def seen() -> list[str]:
    return sys.modules["upstream"].seen


def test_nothing_is_imported_until_the_upstream_module_is(place):
    after_import("upstream.part", "follower")
    assert "upstream" not in sys.modules and "follower" not in sys.modules
    importlib.import_module("upstream.part")
    assert seen() == ["upstream", "part", "follower"]


def test_an_upstream_module_that_is_there_already_is_followed_at_once(place):
    importlib.import_module("upstream.part")
    after_import("upstream.part", "follower")
    assert seen() == ["upstream", "part", "follower"]


def test_the_upstream_module_is_as_if_nobody_followed_it(place):
    plain = importlib.import_module("upstream.part")
    expected = (type(plain.__loader__), type(plain.__spec__.loader), plain.__file__)
    del sys.modules["upstream.part"]
    after_import("upstream.part", "follower")
    followed = importlib.import_module("upstream.part")
    assert (type(followed.__loader__), type(followed.__spec__.loader), followed.__file__) == expected
    assert "value = 1" in inspect.getsource(followed)
    assert importlib.reload(followed) is followed
    assert seen().count("follower") == 1


def test_a_follower_that_fails_is_said_and_the_upstream_module_works(place, caplog):
    after_import("upstream.part", "broken")
    assert importlib.import_module("upstream.part").value == 1
    assert "broken could not be loaded" in caplog.text and "no such library" in caplog.text


def test_a_program_run_from_the_module_has_its_code(place, python):
    (place / "run.py").write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(Path(place))!r})\n"
        "from verl_mux.post_import import after_import\n"
        "after_import('upstream.part', 'follower')\n"
        "print(runpy.run_module('upstream.part')['value'])\n"
    )
    result = python(str(place / "run.py"))
    assert (result.stdout, result.returncode) == ("1\n", 0), result.stderr
