"""Which processes of this host carry the mark of which job.

Reading every environment is dear, and it does not change while a process runs the same program. So what was read is kept for a
while, except when something is looked for, of which a new process or a new program must not be missed.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import psutil

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus.messages import Look, Member

# A process may go on as another program with another environment.
_READ_AGAIN_S = 10.0


class Marked:
    """`find` -> uid -> processes. It remembers those found: one that is ending has no environment any more, but holds memory."""

    def __init__(self) -> None:
        self._known: dict[Member, str] = {}  # with its uid; empty: none
        self._read_at = float("-inf")

    def find(self, fresh: bool) -> dict[str, list[Member]]:
        fresh = fresh or time.monotonic() - self._read_at > _READ_AGAIN_S
        if fresh:
            self._read_at = time.monotonic()
        family = members.own_family()
        known: dict[Member, str] = {}
        for pid in psutil.pids():
            if pid in family:
                continue
            with contextlib.suppress(psutil.Error, OSError):
                member = members.member_of(pid)
                known[member] = self._known.get(member, "")
                if fresh or member not in self._known:
                    known[member] = members.mark_of(pid) or known[member]
        self._known = known
        found: defaultdict[str, list[Member]] = defaultdict(list)
        for member, uid in known.items():
            if uid and members.is_alive(member):
                found[uid].append(member)
        return dict(found)

    def look(self, asked: Mapping[str, Sequence[Member]]) -> list[Look]:
        """For each uid: which of these processes, and which with its mark, live. Looked for twice: what a dying process starts
        while the first look goes on may be missed by it."""
        first = self._look(asked)
        unsure = {look.uid: asked[look.uid] for look in first if not look.alive}
        again = {look.uid: look for look in self._look(unsure)} if unsure else {}
        return [again.get(look.uid, look) for look in first]

    def _look(self, asked: Mapping[str, Sequence[Member]]) -> list[Look]:
        found = self.find(fresh=True)
        return [
            Look(uid, list(dict.fromkeys([*(member for member in known if members.is_alive(member)), *found.get(uid, ())])))
            for uid, known in asked.items()
        ]
