"""What a finding is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that cost time.

    kind: one of those that all_findings.DETECTORS names. step, replica, node, worker: where (the worst place, if several); None
    where it is of no one, or the log does not say. seconds: how long the thing itself took, there. cost_s: seconds it cost all in
    all, by which findings are ranked. turn: 1 is the first.
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
    cost_s: float = 0.0
    start: float | None = None
    end: float | None = None
    replica: int | None = None
    node: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        told = asdict(self)
        told["seconds"], told["cost_s"] = round(self.seconds, 6), round(self.cost_s or self.seconds, 6)
        return told
