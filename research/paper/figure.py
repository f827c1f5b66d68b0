"""One figure of the paper beside ours, and figures as a Markdown table. Called by __main__.py; pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# How near a figure is reproduced if the row asks for nothing else, relative to the paper's.
NEAR = 0.10


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """`paper` None: the paper gives none. `ours` None: not run here. within: the relative difference that this project
    asks for, None where it asks for none. basis: `fitted` if the model was fitted to this very figure, `assumed` if the paper's
    text does not say what to run. at_most: less than the paper's is as good. remark: what the paper's text leaves open."""

    claim: str
    name: str
    paper: float | None
    ours: float | None
    unit: str = ""
    within: float | None = None
    basis: str = ""
    at_most: bool = False
    remark: str = ""

    @property
    def difference(self) -> float | None:
        """(ours - paper) / paper."""
        return None if not self.paper or self.ours is None else self.ours / self.paper - 1

    @property
    def met(self) -> bool | None:
        """Whether the difference is as small as asked for; None where nothing is asked for."""
        return None if self.within is None or self.difference is None else abs(self.difference) <= self.within

    @property
    def tag(self) -> str:
        """`fitted`; `missed` if it is not near the paper's; else `assumed` or `reproduced`. Empty without a figure of either."""
        if self.paper is None or self.ours is None:
            return ""
        if self.basis == "fitted":
            return "fitted"
        room = self.paper * (NEAR if self.within is None else self.within)
        off = self.ours - self.paper
        return "missed" if (off if self.at_most else abs(off)) > room else self.basis or "reproduced"

    def as_row(self) -> dict:
        """Plain data for JSON."""
        return {
            **{name: getattr(self, name) for name in ("claim", "name", "paper", "ours", "unit", "within", "tag", "remark")},
            "difference": self.difference,
            "met": self.met,
        }


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


def markdown(figures: Sequence[Figure]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    return "\n".join(lines + ["| " + " | ".join(row(figure)) + " |" for figure in figures])
