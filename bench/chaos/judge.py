"""What was violated in a schedule, from what its processes saw. Pure.

- double use: two processes used a device at once; a device was used under a token older than one it had seen; a late call was
  taken; a token was granted twice.
- a lease was lost, or a job was killed, although the job had never been out of touch for as long as its lease allows.
- a step that a job which was never killed did twice, or left out.
- a job waits for ever.

Called by chaos_bench.py and tests.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from bench.chaos.faults import KINDS, LEASE_S
from bench.chaos.ledger import Line

# Out of touch for longer than this, a client may find its lease gone: it fences itself at 0.7 of it.
_EXCUSED_S = 0.6 * LEASE_S
_WRONG = ("double use", "old token", "late use", "waits for ever")
# Seconds that a reconnection may take; outages closer together count as one.
_CLOSE_S = 1.0


class Verdict(msgspec.Struct):
    """`violations`: (what, after which kind of fault). `grants_s`: seconds each grant took that no fault disturbed. `back_s`:
    seconds until a coordinator that was started again listened."""

    violations: list[tuple[str, str]]
    lost_steps: int
    faults: Counter[str]
    grants_s: list[float]
    back_s: list[float]


def judge(lines: list[Line]) -> Verdict:
    away = _Away(lines)
    found = [line for line in lines if line.what in _WRONG]
    found += _granted_twice(lines)
    found += [line for line in lines if line.what == "lease lost" and not away.excuses(line.who, line.at, lines)]
    found += _died(lines, away)
    lost = sum(_lost_steps(lines, job) for job in _survivors(lines))
    faults = [line for line in lines if line.who == "runner" and line.what in KINDS]
    violations = [(line.what, _before(faults, line.at)) for line in found]
    _first, *back = [up.at - start.at for start, up in _pairs(lines, "coordinator started", "coordinator up")] or [0.0]
    return Verdict(violations, lost, Counter(line.what for line in faults), list(_grants(lines, away)), back)


def _before(faults: list[Line], at: float) -> str:
    return next((line.what for line in reversed(faults) if line.at <= at), "nothing")


def _granted_twice(lines: list[Line]) -> list[Line]:
    first: dict[int, Line] = {}
    again = [line for line in lines if line.what == "granted" and first.setdefault(line.token, line) is not line]
    return [msgspec.structs.replace(line, what="token granted twice") for line in again]


def _died(lines: list[Line], away: _Away) -> list[Line]:
    """Jobs that ended without a fault that explains it."""
    killed = {(line.text, n) for line in lines if line.what == "job killed" for n in (_ended_after(lines, line),)}
    lost = {(line.who, line.pid) for line in lines if line.what == "lease lost"}
    ended = [line for line in lines if line.what == "ended" and line.step != 0 and (line.text, line.at) not in killed]
    found = [line for line in ended if (line.text, line.pid) not in lost and not away.excuses(line.text, line.at, lines)]
    return [msgspec.structs.replace(line, what="job died") for line in found]


def _ended_after(lines: list[Line], killed: Line) -> float:
    return next((line.at for line in lines if line.what == "ended" and line.text == killed.text and line.at > killed.at), 0.0)


def _survivors(lines: list[Line]) -> list[str]:
    hurt = {line.text for line in lines if line.what == "ended" and line.step != 0}
    return sorted({line.who for line in lines if line.what == "step"} - hurt)


def _lost_steps(lines: list[Line], job: str) -> int:
    done = [line.step for line in lines if line.what == "step" and line.who == job]
    return sum(after != before + 1 for before, after in itertools.pairwise([0, *done]))


def _pairs(lines: list[Line], first: str, second: str, text: str | None = None) -> Iterator[tuple[Line, Line]]:
    begun: Line | None = None
    for line in lines:
        if text is not None and line.text != text:
            continue
        if line.what == first:
            begun = line
        elif line.what == second and begun is not None:
            yield begun, line
            begun = None


class _Away:
    """When the coordinator, or a job, could not be reached or could not run."""

    def __init__(self, lines: list[Line]) -> None:
        down = [(a.at, b.at) for a, b in _pairs(lines, "coordinator down", "coordinator up")]
        self._coordinator = down + _spans(lines, "coordinator stopped", "")
        self._job: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for job in {line.text for line in lines if line.what in ("job stopped", "job cut off")}:
            self._job[job] = _spans(lines, "job stopped", job) + _spans(lines, "job cut off", job)

    def excuses(self, job: str, at: float, lines: list[Line]) -> bool:
        """Whether the job was out of touch for long enough, in one piece, while it held what it held last."""
        since = max((line.at for line in lines if line.what == "granted" and line.who == job and line.at <= at), default=0.0)
        longest, end, begin = 0.0, float("-inf"), 0.0
        for a, b in sorted(self._coordinator + self._job[job]):
            if b < since or a > at:
                continue
            begin = a if a > end + _CLOSE_S else begin
            end = max(end, b)
            longest = max(longest, end - begin)
        return longest > _EXCUSED_S

    def disturbed(self, begin: float, end: float) -> bool:
        spans = self._coordinator + [span for spans in self._job.values() for span in spans]
        return any(a - _CLOSE_S < end and begin < b + _CLOSE_S for a, b in spans)


def _spans(lines: list[Line], what: str, text: str) -> list[tuple[float, float]]:
    return [(a.at, b.at) for a, b in _pairs(lines, what, f"{what} no more", text)]


def _grants(lines: list[Line], away: _Away) -> Iterator[float]:
    """From when the last of its nodes was given back, or from asking where that was later, to holding; in quiet times only."""
    given_back: dict[str, Line] = {}
    for line in lines:
        if line.what == "released":
            given_back |= dict.fromkeys(line.nodes, line)
        if line.what != "granted" or line.step == 0:
            continue
        before = [given_back[node] for node in line.nodes if node in given_back]
        since = max([line.asked_at, *(back.at for back in before)])
        if line.at >= since and not away.disturbed(since - _CLOSE_S, line.at):
            yield line.at - since
