"""Run as a program with one of our modes on its command line: imports verl and SGLang as a job does, prints what it found.

stdout's last line is one JSON object: `platform`, and for every name (of upstream.py, and every name that our modules import
from verl or SGLang) its parameters, or the reason why it is not there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import os
import warnings
from pathlib import Path

import verl_mux

PACKAGE = Path(verl_mux.__file__).parent


def imported_names() -> list[str]:
    """Every `module.name` that a module of ours imports from verl or SGLang."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("verl", "sglang"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return sorted(found)


def resolve(name: str):
    """The object of a dotted name: the longest importable module, then attributes. Raises ImportError or AttributeError."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name and not name.startswith(error.name):
                raise
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def parameters(found) -> list[str] | None:
    modified = getattr(getattr(found, "__ray_metadata__", None), "modified_class", found)
    try:
        return list(inspect.signature(modified).parameters)
    except (TypeError, ValueError):
        return None


def describe(name: str) -> dict:
    try:
        return {"parameters": parameters(resolve(name))}
    except (ImportError, AttributeError) as error:
        return {"missing": f"{type(error).__name__}: {error}"}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import verl  # noqa: F401
    from verl.plugin.platform.platform_manager import get_platform

    from tests.test_upstream import SIGNATURES
    from verl_mux import upstream

    names = {symbol.name for symbol in (*upstream.VERL, *upstream.SGLANG)} | set(imported_names()) | set(SIGNATURES)
    result = {
        "variable": os.environ.get("VERL_PLATFORM"),
        "platform": get_platform().device_name,
        "names": {name: describe(name) for name in sorted(names)},
    }
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
