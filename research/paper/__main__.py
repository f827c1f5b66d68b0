"""`python -m research.paper [--only R1,R6] [--json]`: the paper's figures beside ours."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer

from research.paper import others, schedules, tails, traces
from research.paper.figure import Figure, markdown
from verl_mux.errors import UserError


class Claim(msgspec.Struct, frozen=True):
    title: str
    run: Callable[[], list[Figure]]


CLAIMS: dict[str, Claim] = {
    "R1": Claim("periods of figure 10", schedules.periods_of_figure_10),
    "R2": Claim("interference of figure 3", schedules.interference),
    "R3": Claim("cost efficiency of figure 10", schedules.cost_efficiency),
    "R4": Claim("cold starts", schedules.cold_starts),
    "R5": Claim("long-tail migration", tails.migrations),
    "R6": Claim("the twelve syncs of figure 12", others.syncs),
    "R7": Claim("cost over the optimum, figure 14", traces.cost_over_optimum),
    "R8": Claim("random and most-idle placement, figure 14", traces.baselines),
    "R9": Claim("two weeks of the testbed, figure 13", traces.two_weeks),
    "R10": Claim("decision latency, table 5", traces.latencies),
    "R11": Claim("theorem 1", others.theorem_1),
    "R12": Claim("estimates while real lengths vary (not in the paper)", traces.uncertain_estimates),
    "R13": Claim("interference, table 4", others.interference),
    "R14": Claim("Gavel+ and veRL, figure 10", others.other_systems),
    "R15": Claim("other SLOs and caps, figure 14", traces.sweeps),
}


def find_claims(only: str) -> list[str]:
    """`R1,R6` as a list; all for an empty text. Raises UserError for one that is not known."""
    names = [name.strip().upper() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in CLAIMS:
            raise UserError(f"claim {name!r} is not known; allowed: {', '.join(CLAIMS)}")
    return names or list(CLAIMS)


def rerun(
    only: Annotated[str, typer.Option(help="Claims to rerun, e.g. R1,R6; all by default.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Rerun what can be rerun of the RollMux paper (arXiv 2512.11306v2) without its testbed."""
    figures: list[Figure] = []
    for claim in find_claims(only):
        started = time.monotonic()
        figures += CLAIMS[claim].run()
        print(f"{claim}: {CLAIMS[claim].title} ({time.monotonic() - started:.1f} s)", file=sys.stderr)
    if json:
        print(json_module.dumps({"figures": [figure.as_row() for figure in figures]}, indent=2))
    else:
        print(markdown(figures))


def main() -> None:
    """User mistakes end in one line on stderr and exit code 2."""
    try:
        typer.run(rerun)
    except UserError as error:
        print(f"rollmux_paper: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
