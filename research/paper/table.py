"""Figures as a table for people, and as Markdown for the README."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from research.paper.figure import Figure

COLUMNS = ("", "what", "paper", "ours", "difference", "tag", "remark")


def row(figure: Figure) -> tuple[str, ...]:
    """The cells of one figure, in the order of COLUMNS."""
    difference = "" if figure.difference is None else f"{figure.difference:+.1%}"
    if figure.within is not None and figure.met is not None:
        difference += f" ({'within' if figure.met else 'beyond'} {figure.within:.0%})"
    return (
        figure.claim,
        figure.name,
        _number(figure.paper, figure.unit),
        _number(figure.ours, figure.unit),
        difference,
        figure.tag,
        figure.remark,
    )


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 or float(value).is_integer() else 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f} {unit}".strip()


def print_table(figures: Sequence[Figure], console: Console) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in ("paper", "ours") else "left", overflow="fold")
    for figure in figures:
        table.add_row(*row(figure))
    console.print(table)


def markdown(figures: Sequence[Figure]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    return "\n".join(lines + ["| " + " | ".join(row(figure)) + " |" for figure in figures])
