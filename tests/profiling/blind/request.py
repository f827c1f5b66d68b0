"""One sample of a made run, and a prompt group of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.profiling.blind.engine import Engine, Stay


@dataclass
class Request:
    """One sample. waits: `engine`, `park` or None. budget: tokens that its round still allows; None: no limit."""

    id: str
    worker: int
    step: int
    prompt: int
    turns: list[tuple[int, str | None, float]]  # tokens, then the tool and its seconds
    reward_s: float
    validate: bool
    life: Iterator = field(default_factory=lambda: iter(()))
    stay: Stay | None = None
    engine: Engine | None = None
    home: Engine | None = None  # where its turns go while it can
    open: bool = True
    parked: bool = False
    ending: bool = False
    ended: bool = False
    held_by: str = "cut off"
    budget: int | None = None
    tokens: int = 0
    stays: int = 0
    parked_s: float = 0.0


@dataclass
class Group:
    requests: list[Request]
    cuts: int = 0

    @property
    def ended(self) -> bool:
        return all(request.ended for request in self.requests)
