"""One figure of the paper beside ours."""

from __future__ import annotations

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """`paper` None: the paper gives none. `ours` None: not run here. within: the relative difference that this project
    asks for, None where it asks for none. remark: what the paper's text leaves open."""

    claim: str
    name: str
    paper: float | None
    ours: float | None
    unit: str = ""
    within: float | None = None
    remark: str = ""

    @property
    def difference(self) -> float | None:
        """(ours - paper) / paper."""
        return None if not self.paper or self.ours is None else self.ours / self.paper - 1

    @property
    def met(self) -> bool | None:
        """Whether the difference is as small as asked for; None where nothing is asked for."""
        return None if self.within is None or self.difference is None else abs(self.difference) <= self.within

    def as_row(self) -> dict:
        """Plain data for JSON."""
        return {
            **{name: getattr(self, name) for name in ("claim", "name", "paper", "ours", "unit", "within", "remark")},
            "difference": self.difference,
            "met": self.met,
        }
