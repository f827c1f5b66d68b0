"""The `verl-mux` command. Each sub-command lives beside what it drives and is imported only when it is called."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

import typer

from verl_mux.errors import Failure, UserError

# name -> (module, function, one line of help); the module is imported when the command runs or asks for its own --help.
COMMANDS = {
    "run": ("verl_mux.launcher.command", "run", "Start a coordinator and several jobs from one YAML file, and watch them."),
    "submit": ("verl_mux.launcher.command", "submit", "Start the jobs of a run file for a coordinator that runs already."),
    "coordinator": ("verl_mux.coordinator.command", "coordinator", "Serve leases to jobs until interrupted."),
    "status": ("verl_mux.coordinator.command", "status", "Ask a coordinator who runs which phase, and who waits."),
    "evict": ("verl_mux.coordinator.by_hand_command", "evict", "End a job as if it had failed."),
    "budget": ("verl_mux.coordinator.by_hand_command", "budget", "Let a job cost so much in all."),
    "release": ("verl_mux.coordinator.by_hand_command", "release", "Free what an ending job holds where nobody can look."),
    "hold": ("verl_mux.filler.command", "hold", "Run a command on nodes that no job uses, and leave when one wants them."),
    "drain": ("verl_mux.coordinator.by_hand_command", "drain", "Give a node to nobody any more."),
    "reload": ("verl_mux.coordinator.by_hand_command", "reload", "Have the coordinator read the pools in its file again."),
    "agent": ("verl_mux.agent.command", "agent", "Look at this host for a coordinator: processes and memory of jobs."),
    "keys": ("verl_mux.coordinator.command", "keys", "Make the keys of a coordinator and of those who talk to it."),
    "plan": ("verl_mux.launcher.plan.command", "plan", "Say where jobs would go, what memory they need, or how weights go."),
    "simulate": ("verl_mux.simulation.command", "simulate", "Compare placement policies on a trace of jobs."),
    "top": ("verl_mux.top_command", "top", "Show what a run does now: jobs, replicas, requests, who waits."),
    "report": ("verl_mux.report_command", "report", "Say where the time of a run went, from its event log."),
    "doctor": ("verl_mux.launcher.doctor", "doctor", "Check this machine: plugin, versions, platform, memory, ports."),
}
BENCHES = {
    "mux": ("verl_mux.bench.mux", "bench_mux", "Two jobs: one after the other, uncoordinated, interleaved."),
    "forged": ("verl_mux.bench.hostile", "bench_forged", "Forged registrations: which strangers' processes are ended for them."),
    "hostile": ("verl_mux.bench.hostile", "bench_hostile", "Malformed frames and hostile messages at a coordinator."),
    "load": ("verl_mux.bench.load", "bench_load", "Thousands of jobs at one coordinator."),
    "leases": ("verl_mux.bench.leases", "bench_leases", "Hand-over of a node between two jobs: release to grant."),
    "filler": ("verl_mux.bench.filler", "bench_filler", "Fillers beside two jobs: what they cost, and what they use."),
    "chaos": ("verl_mux.bench.chaos.command", "bench_chaos", "Leases while processes, connections and disks fail."),
    "scheduler": ("verl_mux.bench.scheduler", "bench_scheduler", "Placement decisions among many running jobs."),
    "log": ("verl_mux.bench.log_cost", "bench_log", "The event log: microseconds an event, percent of a real step."),
    "memory": ("verl_mux.bench.memory", "bench_memory", "Sleep and wake of a real engine: tokens, bytes, and time."),
    "report": ("verl_mux.bench.report", "bench_report", "The report on a made log: seconds and memory."),
    "rollout": (
        "verl_mux.bench.rollouts.command",
        "bench_rollout",
        "Over-sampling and segments beside plain steps, on real jobs.",
    ),
    "tail": (
        "verl_mux.bench.rollouts.tail",
        "bench_tail",
        "Recorded lengths through every way to cut a rollout's tail; no engine.",
    ),
    "migration": ("verl_mux.bench.rollouts.command", "bench_migration", "Long-tail migration beside none, on two real jobs."),
    "predictor": ("verl_mux.bench.rollouts.command", "bench_predictor", "Length predictors on a file of prompts and lengths."),
    "sync": ("verl_mux.bench.sync.command", "bench_sync", "Weight syncs over shaped links, by every way and by the chosen one."),
}
NODES = {
    "add": ("verl_mux.coordinator.by_hand_command", "node_add", "Bring a node to a pool of a running coordinator."),
    "remove": ("verl_mux.coordinator.by_hand_command", "node_remove", "Take a node out of its pool as soon as no job needs it."),
}
GROUPS = {
    "bench": (BENCHES, "Measure one part, with the figure as JSON."),
    "node": (NODES, "Nodes that come to a running coordinator, or leave it."),
}
# What is wrong with the words of a command line. typer names this kind alone, and carries or imports it by version.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]
# package -> how to get it. Whatever else is missing is a fault, and shows its traceback.
_ENGINE = "uv pip install 'verl-mux[engine]' --override <(echo transformers==5.9.0); pip cannot solve verl with SGLang"
EXTRAS = {
    "verl": _ENGINE,
    "sglang": _ENGINE,
    "polars": "pip install 'verl-mux[report]'",
    "matplotlib": "pip install 'verl-mux[plots]'",
    "lightgbm": "pip install 'verl-mux[predictor]'",
    "scipy": "pip install 'verl-mux[predictor]'",
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
    app = _group(COMMANDS, first, "Run several verl RL jobs on the same GPUs.")
    for name, (table, line) in GROUPS.items():
        app.add_typer(_group(table, second if first == name else None, line), name=name)
    return app


def main() -> None:
    """Entry point: user mistakes end in one line on stderr and exit code 2, failures in exit code 1."""
    try:
        sys.exit(_app(sys.argv[1:])(standalone_mode=False) or 0)
    except _UsageError as error:
        print(_told(error), file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        print("verl-mux: nothing was done", file=sys.stderr)
        sys.exit(1)
    except UserError as error:
        print(f"verl-mux: {error}", file=sys.stderr)
        sys.exit(2)
    except Failure as error:
        print(f"verl-mux: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        words = " ".join(["verl-mux", *sys.argv[1 : 3 if sys.argv[1] in GROUPS else 2]])
        print(f"{words} needs {package}: {EXTRAS[package]}", file=sys.stderr)
        sys.exit(2)


def _told(error: Any) -> str:
    """In one line, with what was given, which pydantic knows and typer leaves out; but help that was not asked for as it is."""
    text = error.format_message()
    if "\n" in text.strip():
        return text
    given = [wrong["input"] for wrong in error.__cause__.errors()] if hasattr(error.__cause__, "errors") else []
    was = f", given {given[0]!r}" if given else ""
    return f"verl-mux: {text.rstrip('.')}{was}; see `{error.ctx.command_path if error.ctx else 'verl-mux'} --help`"
