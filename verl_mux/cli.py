"""The `verl-mux` command, in a process of its own. Each sub-command lives beside what it drives, and is imported when it is
called."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from verl_mux.errors import Failure, UserError

# name -> (module, function, one line of help); the module is imported when the command runs or asks for its own --help.
COMMANDS = {
    "run": ("verl_mux.launcher.command", "run", "Start a coordinator and several jobs from one YAML file, and watch them."),
    "coordinator": ("verl_mux.coordinator.commands", "coordinator", "Serve leases to jobs until interrupted."),
    "status": ("verl_mux.coordinator.commands", "status", "Ask a coordinator which job runs which phase, and which jobs wait."),
    "evict": ("verl_mux.coordinator.commands", "evict", "End a job as if it had failed."),
    "release": ("verl_mux.coordinator.commands", "release", "Free what an ending job holds on hosts that are out of sight."),
    "hold": ("verl_mux.hold", "hold", "Run a command on nodes that no job uses, and leave when one wants them."),
    "agent": ("verl_mux.agent.agent", "agent", "Look at this host for a coordinator: processes and memory of jobs."),
    "keys": ("verl_mux.coordinator.commands", "keys", "Make the keys of a coordinator and of its clients."),
    "plan": ("verl_mux.launcher.plan_command", "plan", "Say where jobs would go, or what memory they need."),
    "top": ("verl_mux.top_command", "top", "Show what a run does now: jobs, replicas, requests, waits."),
    "report": ("verl_mux.report_command", "report", "Say where the time of a run went, from its event log."),
    "doctor": ("verl_mux.launcher.doctor", "doctor", "Check this machine: plugin, versions, platform, memory, ports."),
}
# Commands of a checkout, which no installed package has: name -> the folder that holds them.
CHECKOUT_COMMANDS = {"bench": "bench", "simulate": "research"}
# What is wrong with the words of a command line. typer names this kind alone, and carries or imports it by version.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]
# package -> how to get it. Whatever else is missing is a fault, and shows its traceback.
_ENGINE = "uv pip install 'verl-mux[engine]' --override <(echo transformers==5.9.0); pip cannot solve verl with SGLang"
EXTRAS = {
    "verl": _ENGINE,
    "sglang": _ENGINE,
    "polars": "pip install 'verl-mux[report]'",
    "prometheus_client": "pip install 'verl-mux[metrics]'",
    "scipy": "pip install scipy",
}


def _load(module: str, function: str) -> Callable:
    return getattr(importlib.import_module(module), function)


def _finite(function: Callable) -> Callable:
    """The command, which no option may give infinity or NaN: they pass every comparison with a least or most."""

    @functools.wraps(function)
    def command(*args: Any, **options: Any) -> Any:
        for name, value in options.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"--{name.replace('_', '-')} is {value}; a finite number is needed")
        return function(*args, **options)

    return command


def _not_called() -> None:
    """Stands in the help for a command that was not asked for."""


def _group(table: dict[str, tuple[str, str, str]], asked: str | None, help: str) -> typer.Typer:
    """The commands of `table`; of these only the one that is `asked` for is imported, so that `verl-mux --help` stays fast."""
    group = typer.Typer(no_args_is_help=True, add_completion=False, help=help)
    group.callback()(_not_called)
    for name, (module, function, line) in table.items():
        if name == asked:
            group.command(name)(_finite(_load(module, function)))
        else:
            group.command(name, help=line)(_not_called)
    return group


def _app(arguments: list[str]) -> typer.Typer:
    """Arguments as on the command line, without the program. No group takes options before a command, but --help."""
    first, second, *_ = [*(word for word in arguments if not word.startswith("-")), None, None]
    commands, groups = dict(COMMANDS), {}
    if first in CHECKOUT_COMMANDS:
        _find_checkout(first)
        commands |= importlib.import_module("research").COMMANDS
        groups = importlib.import_module("bench").GROUPS
    app = _group(commands, first, "Run several verl RL jobs on the same GPUs.")
    for name, (table, line) in groups.items():
        app.add_typer(_group(table, second if first == name else None, line), name=name)
    return app


def _find_checkout(command: str) -> None:
    """Let this process and its children import the checkout's folders. Raises UserError in a wheel, which has none of them."""
    root = Path(__file__).resolve().parents[1]
    if not (root / CHECKOUT_COMMANDS[command] / "__init__.py").is_file():
        raise UserError(f"`verl-mux {command}` is not in the installed package: run it from a checkout of verl_mux")
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))


def main() -> None:
    """Entry point: user mistakes end in one line on stderr and exit code 2, failures in exit code 1."""
    if sys.argv[1:] == ["--version"]:
        print(f"verl-mux {importlib.metadata.version('verl-mux')}")
        return
    try:
        sys.exit(_app(sys.argv[1:])(standalone_mode=False) or 0)
    except _UsageError as error:
        text, code = _usage(error), 2
    except typer.Abort:
        text, code = "verl-mux: nothing was done", 1
    except (UserError, Failure) as error:
        text, code = f"verl-mux: {error}", 2 if isinstance(error, UserError) else 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        words = " ".join(["verl-mux", *sys.argv[1 : 3 if sys.argv[1] == "bench" else 2]])
        text, code = f"{words} needs {package}: {EXTRAS[package]}", 2
    if text:
        print(text, file=sys.stderr)
    sys.exit(code)


def _usage(error: Any) -> str:
    """In one line, with the value, which pydantic knows and typer leaves out; help that was not asked for stays as it is."""
    text = error.format_message()
    if not text or "\n" in text.strip():  # no command was named, and its help is printed
        return text
    values = [wrong["input"] for wrong in error.__cause__.errors()] if hasattr(error.__cause__, "errors") else []
    was = f", given {values[0]!r}" if values else ""
    return f"verl-mux: {text.rstrip('.')}{was}; see `{error.ctx.command_path if error.ctx else 'verl-mux'} --help`"
