"""The `verl-mux` command. Each sub-command lives beside what it drives and is imported only when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import click
import typer
import typer.core
import typer.main

from verl_mux.errors import Failure, UserError

# name -> (module, function, one line of help); the module is imported when the command runs or asks for its own --help.
COMMANDS = {
    "run": ("verl_mux.launcher.command", "run", "Start a coordinator and several jobs from one YAML file, and watch them."),
    "coordinator": ("verl_mux.coordinator.command", "coordinator", "Serve leases to jobs until interrupted."),
    "status": ("verl_mux.coordinator.command", "status", "Ask a coordinator who runs which phase, and who waits."),
    "plan": ("verl_mux.simulation.plan", "plan", "Say where jobs would go, at what price, and why not elsewhere."),
    "simulate": ("verl_mux.simulation.command", "simulate", "Compare placement policies on a trace of jobs."),
    "report": ("verl_mux.profiling.command", "report", "Say where the time of a run went, from its event log."),
    "doctor": ("verl_mux.doctor", "doctor", "Check this machine: plugin, versions, platform, memory, ports."),
}
BENCHES = {
    "mux": ("verl_mux.launcher.bench", "bench_mux", "Two jobs: one after the other, uncoordinated, interleaved."),
    "leases": ("verl_mux.coordinator.bench", "bench_leases", "Hand-over of a node between two jobs: release to grant."),
    "scheduler": ("verl_mux.simulation.bench", "bench_scheduler", "Placement decisions among many running jobs."),
    "log": ("verl_mux.profiling.overhead", "bench_log", "The event log: microseconds an event, percent of a real step."),
    "report": ("verl_mux.profiling.bench", "bench_report", "The report on a made log: seconds and memory."),
    "rollout": ("verl_mux.rollout.bench", "bench_rollout", "Over-sampling and segments beside plain steps, on real jobs."),
    "migration": ("verl_mux.rollout.bench", "bench_migration", "Long-tail migration beside none, on two real jobs."),
    "predictor": ("verl_mux.rollout.bench", "bench_predictor", "Length predictors on a file of prompts and lengths."),
}


def _load(module: str, function: str) -> Callable:
    return getattr(importlib.import_module(module), function)


def _lazy_group(table: dict[str, tuple[str, str, str]]) -> type[typer.core.TyperGroup]:
    """A click group whose commands are imported on use, so that `verl-mux --help` stays fast."""

    class LazyGroup(typer.core.TyperGroup):
        def list_commands(self, ctx: click.Context) -> list[str]:
            return [*table, *super().list_commands(ctx)]

        def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
            if name not in table:
                return super().get_command(ctx, name)
            return click.Command(name, help=table[name][2], short_help=table[name][2])

        def resolve_command(self, ctx: click.Context, args: list[str]):
            if not args or args[0] not in table:
                return super().resolve_command(ctx, args)
            name = args[0]
            module, function, _ = table[name]
            command = typer.Typer(add_completion=False)
            command.command(name)(_load(module, function))
            return name, typer.main.get_command(command), args[1:]

    return LazyGroup


app = typer.Typer(
    cls=_lazy_group(COMMANDS), no_args_is_help=True, add_completion=False, help="Run several verl RL jobs on the same GPUs."
)
bench = typer.Typer(cls=_lazy_group(BENCHES), no_args_is_help=True, help="Measure one part, with the figure as JSON.")
app.add_typer(bench, name="bench")


@app.callback()
def _root() -> None:
    """Run several verl RL jobs on the same GPUs."""


@bench.callback()
def _bench() -> None:
    """Measure one part, with the figure as JSON."""


def main() -> None:
    """Entry point: user mistakes end in one line on stderr and exit code 2, failures in exit code 1."""
    try:
        app()
    except UserError as error:
        print(f"verl-mux: {error}", file=sys.stderr)
        sys.exit(2)
    except Failure as error:
        print(f"verl-mux: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
