"""What verl_mux writes into the event log, read from its source: which events, and with which keys of `extra`.

An emitter is a call that is handed `events.NAME`. Its keys are the strings and keywords of that call, of what is assigned to the
names in it, and of the functions that it calls, as far as those are in the same module or imported from one of ours.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from verl_mux.profiling.eventlog import events

ROOT = Path(__file__).parents[3] / "verl_mux"
# Who logs. Elsewhere (the report, the launcher, the benches) events are read, or logged to be measured.
WRITERS = ("coordinator", "agent", "trainer", "rollout", "sync", "memory", "profiling/eventlog/log.py")
# Keys that come from elsewhere: event -> files, and the functions or tables there that make them.
_WHO, _WHERE = ("rollout/engine/serving.py", "keys_of"), ("rollout/engine/sglang/scheduler_log.py", "__init__")
HANDED_IN = {
    events.REQUEST_START: [("rollout/worker/agent_loop.py", "_run_agent_loop")],
    events.REQUEST_COMPLETE: [("rollout/worker/agent_loop.py", "_run_agent_loop")],
    events.SYNC: [("trainer/rollout_engines.py", "_SYNC_FIGURES")],
    events.STEP_REPORT: [("trainer/modes.py", "_compute_metrics")],
    events.SLO_AT_RISK: [("placement/placer.py", "correct")],
    events.ENGINE_QUEUE: [_WHO, _WHERE],
    events.ENGINE_DECODE: [_WHERE],
    events.ENGINE_RETRACT: [_WHERE],
    events.ENGINE_GENERATE: [
        _WHO,
        ("rollout/engine/sglang/manager.py", "FIGURES"),
        ("rollout/engine/sglang/manager.py", "OF_ANSWER"),
    ],
}
LOGGING_CALLS = {"log", "span", "part", "note", "event", "Log", "_log", "_line"}


@cache
def written(level: str) -> dict[str, set[str]]:
    """Event -> all that may be a key of its `extra`, by those who log for `level`."""
    found: dict[str, set[str]] = {}
    for file in _files(level):
        for function in _functions(file):
            for name, call in _emissions(function):
                words = found.setdefault(name, set())
                for part in (call, _target(function, call)) if call is not None else ():
                    words |= _words(part, function, file, frozenset())
    for name, path, made_by in ((name, *place) for name, places in HANDED_IN.items() for place in places):
        if name in found:
            found[name] |= _handed_in(ROOT / path, made_by)
    return found


def _handed_in(file: Path, name: str) -> set[str]:
    function = _function(file, name)
    if function is not None:
        return _all_words(function, file, frozenset())
    return {word for value in _assigned(_tree(file), name) for word in _words(value, _tree(file), file, frozenset())}


def bare_names(level: str) -> list[str]:
    """Calls that log a name of the table as a plain string."""
    return [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in _files(level)
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Call) and _called(node) in LOGGING_CALLS
        for given in node.args[:1]
        if isinstance(given, ast.Constant) and given.value in events.NAMES
    ]


def _files(level: str) -> list[Path]:
    alone = {"coordinator", "agent"}  # rooms whose level is theirs
    paths = [ROOT / name for name in WRITERS if (name == level if level in alone else name not in alone)]
    return [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def _functions(file: Path) -> list[ast.AST]:
    """The module itself, and every function of it."""
    tree = _tree(file)
    return [tree, *(node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))]


def _function(file: Path, name: str) -> ast.AST | None:
    return next((node for node in _functions(file)[1:] if node.name == name), None)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Everything inside, without functions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from _own(child)


def _emissions(function: ast.AST) -> Iterator[tuple[str, ast.Call | None]]:
    """(event, the innermost call that is handed it; None where it only stands in a table)."""
    innermost: dict[ast.AST, ast.Call | None] = {}
    for node in _own(function):
        if isinstance(node, ast.Call):
            innermost.update(dict.fromkeys(ast.walk(node), node))
        elif isinstance(node, ast.Attribute):
            innermost.setdefault(node)
    for node, call in innermost.items():
        name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "events"
        if name and isinstance(value := getattr(events, node.attr, None), str):
            yield value, call


def _target(function: ast.AST, call: ast.Call) -> ast.AST:
    """What `call` is named as in a `with`; else the call again."""
    items = [item for node in _own(function) if isinstance(node, ast.With) for item in node.items]
    return next((item.optional_vars for item in items if item.context_expr is call and item.optional_vars), call)


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _words(node: ast.AST, function: ast.AST, file: Path, seen: frozenset) -> set[str]:
    """Strings and keywords of an expression, of what its names are assigned in `function`, of what it calls."""
    words: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            words.add(part.value)
        elif isinstance(part, ast.keyword) and part.arg:
            words.add(part.arg)
        elif isinstance(part, ast.Name) and (key := (function, part.id)) not in seen:
            seen |= {key}
            for value in _assigned(function, part.id):
                words |= _words(value, function, file, seen)
        if isinstance(part, ast.Call):
            words |= _of_called(part, file, seen)
    return words


def _assigned(function: ast.AST, name: str) -> Iterator[ast.AST]:
    """What makes up the local `name`: values assigned, keys set, and the `with` whose target it is."""
    for node in _own(function):
        if isinstance(node, ast.Assign):
            for target in (one for it in node.targets for one in (it.elts if isinstance(it, ast.Tuple) else [it])):
                if isinstance(target, ast.Name) and target.id == name:
                    yield node.value
                elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id == name:
                    yield target.slice


def _of_called(call: ast.Call, file: Path, seen: frozenset) -> set[str]:
    place = (file, _called(call))
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if isinstance(owner, ast.Name) and owner.id in _imports(file):
        module, name = _imports(file)[owner.id]
        place = (_file(module if owner is call.func else f"{module}.{name}"), place[1])
    if place in seen or not place[0].is_file():
        return set()
    function = _function(*place)
    return _all_words(function, place[0], seen | {place}) if function is not None else set()


@cache
def _imports(file: Path) -> dict[str, tuple[str, str]]:
    """What a file calls it -> module of ours and name there."""
    ours = [n for n in ast.walk(_tree(file)) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("verl_mux")]
    return {alias.asname or alias.name: (node.module, alias.name) for node in ours for alias in node.names}


def _file(module: str) -> Path:
    return ROOT.parent / (module.replace(".", "/") + ".py")


def _all_words(function: ast.AST, file: Path, seen: frozenset) -> set[str]:
    words: set[str] = set()
    for statement in function.body[1:] if ast.get_docstring(function) else function.body:
        words |= _words(statement, function, file, seen)
    return words
