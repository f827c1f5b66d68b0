"""`verl-mux bench sync`: the weight sync over links of known speed, beside `pull`: each worker takes the whole model.

The ends are the product's own, each in a process of its own on a host out of a network namespace. Both classes of link are
shaped by the kernel, the fast one 20 times as fast as the slow one.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any

import typer

from verl_mux.errors import Failure, UserError
from verl_mux.launcher.run_processes import require_verl

_MODEL_MIB, _MOST_MIB = 32, 2**20
# Between what the ends have counted and what the kernel has: its own headers, openings, and what it sent again.
_HEADERS = 1.1
# Times that each way is gone: packets that many streams lose in one full queue make a single time say little.
_ROUNDS = {"per_pair": 1, "shared": 3}


def bench_sync(
    case: Annotated[list[str] | None, typer.Option(help="Only these cases.", show_default=False)] = None,
    model_mib: Annotated[int, typer.Option(help="Size of the model.")] = _MODEL_MIB,
    loopback: Annotated[
        float | None,
        typer.Option(help="Instead: this many GiB over loopback, beside raw sockets.", show_default=False, min=0.001),
    ] = None,
    beside: Annotated[
        bool, typer.Option("--beside", help="Instead: beside verl's own checkpoint engines that run here.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="With --beside: trainer ranks, and as many engines.", min=1, max=64)] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the weight sync and `pull`, its yardstick, over shaped links; or over loopback, or beside verl's own."""
    if sum((bool(case), loopback is not None, beside)) > 1:
        raise UserError("--case, --loopback and --beside are measurements of their own; give one of them")
    if loopback is not None:
        from bench.sync.loopback import over_loopback

        found = over_loopback(round(loopback * 2**30))
        print(json_module.dumps(found) if json else "\n".join(f"{name}: {value}" for name, value in found.items()))
        return
    if not 1 <= model_mib <= _MOST_MIB:
        raise UserError(f"--model-mib is {model_mib}; it must be at least 1 and at most {_MOST_MIB}")
    if beside:
        from bench.sync.beside import beside_verl, lines

        require_verl()
        found = beside_verl(model_mib << 20, ranks)
        print(json_module.dumps(found) if json else "\n".join(lines(found)))
        return
    found = over_links(case, model_mib << 20)
    print(json_module.dumps(found) if json else "\n".join(_lines(found)))


def over_links(names: list[str] | None, model_bytes: int) -> dict[str, Any]:
    """Raises UserError: there is no such case, or shaped links cannot be made here."""
    from bench.sync.cases import CASES
    from bench.sync.links import Bed, can_shape

    known = {case.name: case for case in CASES}
    if unknown := set(names or []) - set(known):
        raise UserError(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if (lacking := can_shape()) is not None:
        raise UserError(f"bench sync cannot make hosts with shaped links here, it lacks {lacking}; try --loopback or --beside")
    cases = {}
    for name in names or known:
        cases[name] = _case(known[name], model_bytes)
        print("\n".join(_lines({"cases": {name: cases[name]}})), file=sys.stderr, flush=True)
    return {"links": Bed.kind, "model_bytes": model_bytes, "cases": cases}


def _case(case: Any, model_bytes: int) -> dict[str, Any]:
    from bench.sync.cases import FAST_OVER_SLOW, limit_seconds
    from bench.sync.group import METHODS, Group
    from bench.sync.links import Bed, Shape

    with (
        Bed(case.senders, case.hosts, Shape(FAST_OVER_SLOW * case.slow, case.slow, case.slow_link)) as bed,
        Group.on(bed, case.workers_per_host, model_bytes, case.shares) as group,
    ):
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
        for version, method in enumerate(METHODS * _ROUNDS[case.slow_link]):
            before = bed.crossed()
            runs[method].append(group.sync(method, version))
            _check(runs[method][-1]["slow_bytes"], bed.crossed() - before, method)
    return {
        "senders": case.senders,
        "hosts": case.hosts,
        "workers_per_host": case.workers_per_host,
        "slow_link": case.slow_link,
        "methods": {method: together(its) for method, its in runs.items()},
        "limit_seconds": limit_seconds(case, model_bytes),
    }


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All runs of one way: the median of their seconds, the most bytes, and `bit_equal` where all of them were."""
    seconds = [it["seconds"] for it in runs]
    most = max(runs, key=lambda it: it["slow_bytes"])
    return {
        "seconds": median(seconds),
        "slow_bytes": most["slow_bytes"],
        "slow_bytes_over_model": most["slow_bytes_over_model"],
        "bit_equal": all(it["bit_equal"] for it in runs),
        "each_seconds": seconds,
    }


def _check(sent: int, counted: int, method: str) -> None:
    """What the ends say that they sent over the slow class is what the interface carried. Raises Failure."""
    if not sent <= counted <= sent * _HEADERS + 2**17:
        raise Failure(f"{method} says that it sent {sent} bytes over the slow links, and their interface counted {counted}")


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, case in found["cases"].items():
        lines.append(f"{name}: no faster than {case['limit_seconds']:.2f} s")
        for method, it in case["methods"].items():
            same = "" if it["bit_equal"] else ", WRONG WEIGHTS"
            lines.append(
                f"  {method:<10} {it['seconds']:8.2f} s, {it['slow_bytes_over_model']:.4f} of the model over slow links{same}"
            )
    return lines
