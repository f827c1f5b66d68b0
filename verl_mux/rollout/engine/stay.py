"""A stay's name: how one request is known from its agent loop to the engine's scheduler.

    <request_id>/<step>/<turn>/<stay>/<8 hex digits>

The digits differ for each stay, so that no name is the beginning of another one: an engine aborts by beginnings.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import uuid4

# The key of a server's answer (`TokenOutput.extra_fields`) under which a stay's figures go back to the agent loop's log.
ANSWER = "mux_stay"


class Stay(NamedTuple):
    """One stay of a request in an engine. step: of the training. turn: of the agent loop. stay: of the request; both from 1."""

    request_id: str
    step: int
    turn: int
    stay: int

    def new_name(self) -> str:
        return f"{self.request_id}/{self.step}/{self.turn}/{self.stay}/{uuid4().hex[:8]}"

    @property
    def keys(self) -> dict[str, Any]:
        """As the event log says it in `extra`."""
        return {"request_id": self.request_id, "turn": self.turn, "stay": self.stay}


def stay_of(name: str) -> Stay | None:
    """The stay of that name; None where another client than our agent loops named the request."""
    request_id, *numbers = name.rsplit("/", 4)
    if len(numbers) != 4 or not all(number.isdigit() for number in numbers[:3]):
        return None
    return Stay(request_id, *map(int, numbers[:3]))


def keys_of(name: str) -> dict[str, Any]:
    """What the event log says of a request that an engine knows by this name."""
    known = stay_of(name)
    return {"request_id": name} if known is None else known.keys
