"""`python -m tests.lint.budgets`: is every room within its budget? Prints what is over, and exits with 1 if anything is.

The budgets stand in pyproject.toml under `tool.budgets`. Lines count blanks and comments. Besides sizes it checks that every
module has a header, that no two modules of the package have the same name, and that no prose uses words that hide a subject.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
# A name in backticks, an attribute and a value in an f-string are code.
HIDDEN_SUBJECTS = re.compile(r"(?<![.`{])\b(whoever|somebody|nobody|told|so many)\b", re.IGNORECASE)
HAS_PROSE = ("verl_mux", "verl_mux_cpu", "bench", "research", "examples", "recipes", "docs")


def python_files(place: str) -> list[Path]:
    """The Python files of a folder, or the one that `place` names."""
    path = ROOT / place
    return [path] if path.suffix == ".py" else sorted(file for file in path.rglob("*.py") if "build" not in file.parts)


def lines(places: str) -> int:
    """Lines of Python in one or more folders or files, separated by spaces."""
    return sum(len(file.read_text().splitlines()) for place in places.split() for file in python_files(place))


def words(places: str) -> int:
    """Words of the Markdown files in one or more folders or files."""
    files = [
        file for place in places.split() for file in ([ROOT / place] if place.endswith(".md") else (ROOT / place).rglob("*.md"))
    ]
    return sum(len(file.read_text().split()) for file in files)


def leaves(tree: Any) -> int:
    """Keys of a nested mapping that hold a value."""
    return sum(map(leaves, tree.values())) if isinstance(tree, dict) and tree else 1


def struct_leaves(struct: type[msgspec.Struct], seen: frozenset[type] = frozenset()) -> int:
    """Keys of a struct and of the structs that its fields hold, each struct counted once."""
    count = 0
    for hint in get_type_hints(struct).values():
        inner = [kind for kind in _types(hint) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
        count += sum(struct_leaves(kind, seen | {struct}) for kind in inner if kind not in seen) if inner else 1
    return count


def _types(hint: Any) -> Iterator[Any]:
    yield hint
    for argument in get_args(hint):
        yield from _types(argument)


def commands() -> dict[str, int]:
    """Options of each command of the installed package, without its arguments and `--help`."""
    from verl_mux.cli import COMMANDS

    functions = {name: getattr(importlib.import_module(module), function) for name, (module, function, _) in COMMANDS.items()}
    return {name: sum("OptionInfo" in repr(hint) for hint in _hints(function)) for name, function in functions.items()}


def _hints(function: Any) -> Iterator[Any]:
    return iter(get_type_hints(function, include_extras=True).values())


def over(budgets: dict[str, Any]) -> Iterator[str]:
    """One line for each budget that does not hold."""
    from verl_mux.coordinator.core.settings import Config

    for what, measure in (("lines", lines), ("words", words)):
        for places, most in budgets[what].items():
            if (now := measure(places)) > most:
                yield f"{places}: {now} {what}, at most {most}"
    for places, most in budgets["files"].items():
        if (now := sum(len(python_files(place)) for place in places.split())) > most:
            yield f"{places}: {now} files, at most {most}"
    options = commands()
    counted = {
        "readme_lines": len((ROOT / "README.md").read_text().splitlines()),
        "commands": len(options),
        "options": sum(options.values()),
        "mux_keys": leaves(yaml.safe_load((ROOT / "verl_mux/config/mux/default.yaml").read_text())),
        "coordinator_keys": struct_leaves(Config),
    }
    for what, now in counted.items():
        if now > budgets[what]:
            yield f"{what}: {now}, at most {budgets[what]}"


def unreadable() -> Iterator[str]:
    """One line for each module without a header, with a name that another one has, or with a sentence that hides its subject."""
    named = defaultdict(list)
    for file in [file for place in ("verl_mux", "verl_mux_cpu", "bench", "research") for file in python_files(place)]:
        if not ast.get_docstring(ast.parse(file.read_text())):
            yield f"{file.relative_to(ROOT)}: no header; say what runs it, what calls it, and what it may touch"
    for file in python_files("verl_mux"):
        # Engines are siblings: each folder has a server.py.
        if not file.name.startswith("__") and file.parents[1].name != "engine":
            named[file.name].append(str(file.relative_to(ROOT)))
    yield from (f"{' and '.join(files)}: two modules of one name" for files in named.values() if len(files) > 1)
    texts = [file for place in HAS_PROSE for kind in ("*.py", "*.md", "*.yaml") for file in (ROOT / place).rglob(kind)]
    for file in [*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for number, text in prose(file):
            if found := HIDDEN_SUBJECTS.search(text):
                yield f"{file.relative_to(ROOT)}:{number}: {found[0]!r}; name the rank, the job, the file"


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of each line; of Python only comments and strings."""
    if file.suffix != ".py":
        yield from enumerate(file.read_text().splitlines(), 1)
        return
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    with file.open("rb") as content:
        for token in tokenize.tokenize(content.readline):
            if token.type in kinds and " " in token.string.strip():  # one word is a key or a name
                yield from enumerate(token.string.splitlines(), token.start[0])


def main() -> int:
    """The exit code."""
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["budgets"]
    found = [*over(budgets), *unreadable()]
    print("\n".join(found) or "every budget holds")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
