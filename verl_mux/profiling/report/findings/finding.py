"""What a finding is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that cost time.

    kind: one of those that all_findings.DETECTORS names. step, worker: where (the worst place, if several). seconds: how long
    the thing itself took, there. lost: seconds it cost all in all, by which findings are ranked. turn: 1 is the first.
    """

    kind: str
    job: str
    step: int | None
    worker: int | None
    seconds: float
    text: str
    advice: str
    request_id: str | None = None
    turn: int | None = None
    lost: float = 0.0
    start: float | None = None
    end: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        told = asdict(self)
        told["seconds"], told["lost"] = round(self.seconds, 6), round(self.lost or self.seconds, 6)
        return told
