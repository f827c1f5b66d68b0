"""`python -m research.paper [--only R1,R6] [--json] [--plot DIR]`: the paper's figures beside ours."""

from __future__ import annotations

import json as json_module
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from research.paper.claims import CLAIMS, find_claims
from research.paper.figure import Figure
from research.paper.table import markdown, print_table
from verl_mux.errors import UserError


def rerun(
    only: Annotated[str, typer.Option(help="Claims to rerun, e.g. R1,R6; all by default.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of README.md.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Folder for the plots.")] = None,
) -> None:
    """Rerun what can be rerun of the RollMux paper (arXiv 2512.11306v2) without its testbed."""
    figures: list[Figure] = []
    for claim in find_claims(only):
        started = time.monotonic()
        figures += CLAIMS[claim].run()
        print(f"{claim}: {CLAIMS[claim].title} ({time.monotonic() - started:.1f} s)", file=sys.stderr)
    if plot is not None:
        from research.paper.plots import draw

        draw(figures, plot)
    if json:
        print(json_module.dumps({"figures": [figure.as_row() for figure in figures]}, indent=2))
    elif as_markdown:
        print(markdown(figures))
    else:
        print_table(figures, Console(width=None if sys.stdout.isatty() else 160))


def main() -> None:
    """User mistakes end in one line on stderr and exit code 2."""
    try:
        typer.run(rerun)
    except UserError as error:
        print(f"rollmux_paper: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
