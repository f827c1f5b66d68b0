"""Run as a program with one of our modes on its command line: imports verl and SGLang as a job does, prints what it found.

stdout's last line is one JSON object: `platform`; `protocols`, null or what does not hold of each; `engines`: see `engine_parts`;
`names`, for every name (of upstream.py and the engines' records, and every one that our modules import from verl or SGLang) its
parameters, or the reason why it is not there.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import logging
import os
import pkgutil
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import verl_mux
from verl_mux.rollout.engine.record import engines, installed
from verl_mux.worker_settings import WorkerSettings

PACKAGE = Path(verl_mux.__file__).parent
# What verl_mux/rollout/engine/record.py promises of a server.
SERVER = ["abort_requests", "generate", "processes", "sleep", "wake_up"]


def imported_names() -> list[str]:
    """Every `module.name` that a module of ours imports from verl or an engine."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("verl", *engines()):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return sorted(found)


def is_here(name: str) -> bool:
    """Not of an engine, or of verl's part for one, whose package another environment has; and Megatron's alike."""
    absent = set(engines()) - {engine.name for engine in installed()}
    if find_spec("megatron") is None and (".megatron." in name or name.startswith(("megatron.", "mbridge."))):
        return False
    return not any(name.startswith(f"{engine}.") or f".{engine}_rollout" in name for engine in absent)


def parameters(found) -> list[str] | None:
    modified = getattr(getattr(found, "__ray_metadata__", None), "modified_class", found)
    try:
        return list(inspect.signature(modified).parameters)
    except (TypeError, ValueError):
        return None


def describe(name: str) -> dict:
    try:
        return {"parameters": parameters(pkgutil.resolve_name(name))}
    except (ImportError, AttributeError) as error:
        return {"missing": f"{type(error).__name__}: {error}"}


def engine_parts(engine) -> dict:
    """What a job of ours makes of an engine: its replica, its server and (on the CPU) its rollout worker's adapter."""
    from verl.workers.rollout.base import get_rollout_class

    from verl_mux.rollout.engine.replica import replica_class

    made = replica_class(engine)
    server = pkgutil.resolve_name(engine.server)
    stand_in = SimpleNamespace(
        _settings=WorkerSettings(rollout_nodes=("r0", "r1")), config=SimpleNamespace(nnodes=2, n_gpus_per_node=2),
        nnodes=1, replica_world_size=1, replica_rank=2, node_rank=0,
    )  # fmt: skip
    return {
        "replica": [cls.__name__ for cls in made.__mro__][:3],
        "abstract": inspect.isabstract(made),
        "server": [name for name in SERVER if inspect.unwrap(getattr(server, name)).__module__.startswith("verl_mux.")],
        "node": server._node(stand_in),
        "adapter": get_rollout_class(engine.name).__module__,
    }


def broken(check: Callable[[], None]) -> str | None:
    """What does not hold of a protocol."""
    try:
        check()
    except (Exception, SystemExit):  # an argument that a parser does not know ends a process
        return traceback.format_exc(limit=-1)
    return None


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.suppress(ImportError):
        import flashinfer  # noqa: F401  (before a CPU leaves it out: its names are looked at here)
    import verl  # noqa: F401
    from verl.plugin.platform.platform_manager import get_platform

    from tests.upstream.protocols import PROTOCOLS
    from tests.upstream.test_upstream import SIGNATURES, SYMBOLS

    names = filter(is_here, {symbol.name for symbol in SYMBOLS} | set(imported_names()) | set(SIGNATURES))
    result = {
        "variable": os.environ.get("VERL_PLATFORM"),
        "platform": get_platform().device_name,
        "engines": {name: engine_parts(engine) for name, engine in engines().items() if engine in installed()},
        "names": {name: describe(name) for name in sorted(names)},
        "protocols": {name: broken(check) for name, check in PROTOCOLS.items()},
    }
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
