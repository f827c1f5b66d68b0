"""`verl-mux bench sync`: the weight sync over links of known speed, beside `pull`: each worker takes the whole model.

The ends are the product's own, each in a process of its own on a host out of a network namespace. Both classes of link are
shaped by the kernel, the fast one 20 times as fast as the slow one. Runs on the command line; makes the links and starts the
ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

from bench.measuring import AsJson, show
from bench.sync.group import METHODS, Group
from bench.sync.links import Bed, Shape, can_shape
from bench.sync.loopback import over_loopback
from verl_mux.errors import Failure, UserError

_MODEL_MIB, _MOST_MIB = 32, 2**20
# Between what the ends have counted and what the kernel has: its own headers, openings, and what it sent again.
_HEADERS = 1.1
# Times that each way is gone: packets that many streams lose in one full queue make a single time say little.
_ROUNDS = {"per_pair": 1, "shared": 3}


class Case(NamedTuple):
    """`slow_link`: "per_pair" or "shared"; `slow`: bytes a second of it; the fast class has 20 times as many. `uneven`: ranks
    hold parts of different size."""

    senders: int
    hosts: int
    workers_per_host: int
    slow_link: str
    slow: float
    uneven: bool = False

    @property
    def name(self) -> str:
        odd = "_uneven" if self.uneven else ""
        return f"{self.senders}_to_{self.hosts}x{self.workers_per_host}_{self.slow_link}{odd}"

    @property
    def shares(self) -> list[float]:
        parts = [1 + at % 3 if self.uneven else 1 for at in range(self.senders)]
        return [part / sum(parts) for part in parts]


FAST_OVER_SLOW = 20
# A link of its own for each pair is slow enough that two cores carry 64 of them; a shared one is as fast as several.
_PAIR, _SHARED = 1.5e6, 12e6
CASES = (
    Case(1, 1, 1, "per_pair", 4 * _PAIR),
    Case(1, 2, 2, "per_pair", 4 * _PAIR),
    Case(2, 1, 4, "per_pair", 4 * _PAIR),
    Case(2, 2, 2, "per_pair", 2 * _PAIR),
    Case(3, 2, 1, "per_pair", 2 * _PAIR, uneven=True),
    Case(4, 3, 2, "per_pair", 2 * _PAIR),
    Case(8, 1, 2, "per_pair", _PAIR),
    Case(1, 8, 1, "per_pair", 4 * _PAIR),
    Case(5, 7, 1, "per_pair", _PAIR, uneven=True),
    Case(8, 8, 1, "per_pair", _PAIR),
    Case(1, 2, 1, "shared", _SHARED),
    Case(2, 2, 4, "shared", _SHARED),
    Case(4, 3, 2, "shared", _SHARED, uneven=True),
    Case(2, 4, 2, "shared", _SHARED),
)


def limit_seconds(case: Case, model_bytes: int) -> float:
    """No way is faster, each byte crossing the slow class at least once: by the slow link's bandwidth, or by the interface that
    the model has to come in through."""
    # Over a link of its own only a rank's part; parts are held as they are.
    share = 1.0 if case.slow_link == "shared" else max(case.shares)
    slow = share * model_bytes / case.slow
    return max(slow, model_bytes / (FAST_OVER_SLOW * case.slow))


def bench_sync(
    case: Annotated[list[str] | None, typer.Option(help="Only these cases.", show_default=False)] = None,
    model_mib: Annotated[int, typer.Option(help="Size of the model.")] = _MODEL_MIB,
    loopback: Annotated[
        float | None,
        typer.Option(help="Instead: this many GiB over loopback, beside raw sockets.", show_default=False, min=0.001),
    ] = None,
    host: Annotated[
        float | None,
        typer.Option(help="Instead: what a host does with this many GiB, beside memcpy.", show_default=False, min=0.001),
    ] = None,
    json: AsJson = False,
) -> None:
    """Time the weight sync and `pull`, its yardstick, over shaped links; or over loopback; or what a host does in it."""
    if sum(map(bool, (case, loopback, host))) > 1:
        raise UserError("--case, --loopback and --host are measurements of their own; give one of them")
    if loopback is not None:
        return show(over_loopback(round(loopback * 2**30)), json)
    if host is not None:
        from bench.sync.host import of_a_host  # torch

        return show(of_a_host(round(host * 2**30)), json)
    if not 1 <= model_mib <= _MOST_MIB:
        raise UserError(f"--model-mib is {model_mib}; it must be at least 1 and at most {_MOST_MIB}")
    show(over_links(case, model_mib << 20), json, _in_words)


def over_links(names: list[str] | None, model_bytes: int) -> dict[str, Any]:
    """Raises UserError: there is no such case, or shaped links cannot be made here."""
    known = {case.name: case for case in CASES}
    if unknown := set(names or []) - set(known):
        raise UserError(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if (lacking := can_shape()) is not None:
        raise UserError(f"bench sync cannot make hosts with shaped links here, it lacks {lacking}; try --loopback")
    cases = {}
    for name in names or known:
        cases[name] = _case(known[name], model_bytes)
        print(_in_words({"cases": {name: cases[name]}}), file=sys.stderr, flush=True)
    return {"links": Bed.kind, "model_bytes": model_bytes, "cases": cases}


def _case(case: Case, model_bytes: int) -> dict[str, Any]:
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
        **{name: getattr(case, name) for name in ("senders", "hosts", "workers_per_host", "slow_link")},
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


def _in_words(found: dict[str, Any]) -> str:
    lines = []
    for name, case in found["cases"].items():
        lines.append(f"{name}: no faster than {case['limit_seconds']:.2f} s")
        for method, it in case["methods"].items():
            same = "" if it["bit_equal"] else ", WRONG WEIGHTS"
            lines.append(
                f"  {method:<10} {it['seconds']:8.2f} s, {it['slow_bytes_over_model']:.4f} of the model over slow links{same}"
            )
    return "\n".join(lines)
