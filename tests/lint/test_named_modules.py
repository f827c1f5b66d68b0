"""Imports by a string count too: with them as well no circle between neighbours, and nobody names the trainer or cli.

plugin.py and cli.py are the two doors whose tables may name any module.
"""

import ast
import itertools
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "verl_mux"
DOORS = ("verl_mux.plugin", "verl_mux.cli", "verl_mux.__main__")
TOP = ("verl_mux.trainer", "verl_mux.cli")


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module(path): path for path in PACKAGE.rglob("*.py")}


def _known(name: str) -> str | None:
    """The module that a dotted name is, or lies in; None: not one of ours, or the package itself."""
    while name not in MODULES and name:
        name = name.rpartition(".")[0]
    return name if name not in ("", "verl_mux") else None


def _named(path: Path) -> set[str]:
    """Dotted names that a file imports at any depth, or holds as a string."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.replace(":", "."))
    return {name for name in found if name.startswith("verl_mux.")}


ARROWS = {
    module: {known for name in _named(path) if (known := _known(name)) and known != module}
    for module, path in MODULES.items()
    if module not in DOORS
}


def test_nobody_names_the_trainer_or_the_command_line():
    wrong = {
        (module, other)
        for module, others in ARROWS.items()
        for other in others
        if other.startswith(TOP) and not module.startswith("verl_mux.trainer")
    }
    assert wrong == set()


@pytest.mark.parametrize("package", sorted({module.rpartition(".")[0] for module in MODULES} - {""}))
def test_there_is_no_circle_between_neighbours(package):
    neighbours = defaultdict(set)
    depth = package.count(".") + 2
    for module, others in ARROWS.items():
        for ours, theirs in itertools.product([module], others):
            if ours.startswith(f"{package}.") and theirs.startswith(f"{package}."):
                a, b = (".".join(name.split(".")[:depth]) for name in (ours, theirs))
                if a != b:
                    neighbours[a].add(b)
    try:
        TopologicalSorter(neighbours).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))
