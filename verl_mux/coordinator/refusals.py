"""What was refused at the coordinator's door, and what went wrong inside: counted by kind, logged at most once a minute each.

Whoever sends nonsense a thousand times a second must not fill the log; the numbers are in `verl-mux status` and /metrics.
"""

from __future__ import annotations

import collections
import logging
import time

log = logging.getLogger(__name__)

_SAY_EVERY_S = 60.0


class Refusals:
    """`counts` by kind. Kinds are ours, never a sender's words: there are only a few."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._said: dict[str, tuple[float, int]] = {}  # kind -> when, and how many there were then

    def count(self, kind: str, detail: object, error: BaseException | None = None) -> None:
        """`error`: one of ours, to be logged with its traceback."""
        self.counts[kind] += 1
        now = time.monotonic()
        said_at, before = self._said.get(kind, (float("-inf"), 0))
        if now - said_at >= _SAY_EVERY_S:
            self._said[kind] = now, self.counts[kind]
            log.warning("%s (%d of this kind since it was last said): %.500s", kind, self.counts[kind] - before, detail,
                        exc_info=error)  # fmt: skip
