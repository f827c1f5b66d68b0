"""`verl-mux plan`: where jobs would go, or what memory they need."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_mux.errors import UserError

if TYPE_CHECKING:
    from verl_mux.memory.certificate.certify import Certificate, PhaseBytes


def plan(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="YAML: jobs, and optionally pools and rules. With --memory: composed verl configs or run files."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Say what the jobs need of GPUs and hosts that they share, and whether it fits.")
    ] = False,
    pools: Annotated[Path | None, typer.Option(help="With --memory: a coordinator's file, for what its nodes have.")] = None,
    observed: Annotated[
        Path | None, typer.Option(help="With --memory: the folder of a run whose measured bytes correct it.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Place the jobs of a file and say where each goes and why; or, with --memory, certify what they need before they run.

    The certificate's exit code is 1 where they do not fit.
    """
    if not memory and (pools is not None or observed is not None):
        raise UserError("--pools and --observed belong to --memory")
    if not files:
        raise UserError("give a file of jobs")
    if memory:
        from verl_mux.launcher.plan.memory import certificate_of

        found = certificate_of(files, pools, observed)
        print(jsonlib.dumps(found.to_dict()) if json else "\n".join(_lines(found)))
        if not found.fits:
            raise typer.Exit(1)
        return
    if len(files) != 1:
        raise UserError(f"{len(files)} files are given; without --memory one is allowed")
    from verl_mux.launcher.plan import places
    from verl_mux.launcher.plan.jobs_file import read_jobs

    placed = places.make_plan(read_jobs(files[0]))
    print(jsonlib.dumps(placed) if json else "\n".join(places.lines(placed)))


def _lines(found: Certificate) -> list[str]:
    lines = [*found.notes]
    for job, parameters in found.parameters.items():
        active = f", {parameters.active / 1e9:.2f} active" if parameters.active != parameters.total else ""
        kv = found.per_token_kv_bytes[job] / 1024
        lines.append(f"{job}: {parameters.total / 1e9:.2f} billion parameters{active}; {kv:.0f} KiB of KV cache a token")
    for node, gpu in found.gpus.items():
        lines += [f"{node}, one GPU of {gpu.capacity / 1e9:.1f} GB:", *(_phase(*item) for item in gpu.phases.items())]
    for node, host in found.hosts.items():
        of = "" if host.capacity is None else f" of {host.capacity / 1e9:.0f}"
        jobs = ", ".join(f"{job} {num_bytes / 1e9:.0f}" for job, num_bytes in host.jobs.items())
        lines.append(f"{node}, its host: {host.total / 1e9:.0f} GB{of} ({jobs})")
    lines += [f"does not fit: {reason}" for reason in found.why_not]
    for job, share in found.largest_gpu_memory_utilization.items():
        lines.append(f"{job}: the largest gpu_memory_utilization that fits is {'none' if share is None else f'{share:.2f}'}")
    return [*lines, "fits" if found.fits else "does not fit"]


def _phase(name: str, found: PhaseBytes) -> str:
    kinds = ", ".join(f"{kind} {num_bytes / 1e9:.2f}" for kind, num_bytes in found.bytes.items() if num_bytes)
    return f"    {name:8}{found.total / 1e9:7.1f} GB ({found.job}: {kinds})"
