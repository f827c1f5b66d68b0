"""A co-execution group in time: the discrete events behind every predicted and every simulated period.

    [LOADING] -> WAITING(rollout) -> ROLLOUT -> [TAIL] -> WAITING(train) -> TRAIN -> (one more iteration) WAITING(rollout)

Invariants (asserted by the tests):
- a phase holds all its nodes or none, and no node is held twice;
- no phase starts before an earlier-ranked waiting phase that needs one of its nodes (unless that waits for its round);
- a node pays the switch exactly when another job held it last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

# LOADING is a cold start; TAIL is the end of a rollout that no longer holds the nodes.
ROLLOUT, TAIL, TRAIN, LOADING = 0, 1, 2, 3


class Member:
    """One job in a run, and where it stands. Nodes are bits of an int, all nodes in one numbering.

    needs: nodes held in each phase. times: endless seconds for ROLLOUT, TAIL and TRAIN. switch: seconds a phase lasts
    longer when another job held one of its nodes last. rank: see scheduling/time/order.py.
    phase: the one it runs or waits for. since: when that was asked for or, if it runs, started. planned_s: how long
    the running phase takes. resident: nodes that it was the last to hold. done: iterations finished, the last of them
    at `finished`. turns: rollouts begun in this run.
    """

    __slots__ = (
        "name", "needs", "times", "switch", "rank", "has_tail",
        "phase", "since", "planned_s", "resident", "done", "finished", "turns",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        rollout: int,
        train: int,
        times: tuple[Iterator[float], Iterator[float], Iterator[float]],
        switch: tuple[float, float] = (0.0, 0.0),
        rank: int = 0,
        has_tail: bool = False,
    ) -> None:
        self.name = name
        self.needs = (rollout, 0, train, 0)
        self.times = times
        self.switch = (switch[0], 0.0, switch[1], 0.0)
        self.rank = rank
        self.has_tail = has_tail
        self.phase = ROLLOUT
        self.since = self.planned_s = self.finished = 0.0
        self.resident = self.done = self.turns = 0


class GroupRun:
    """`step()` moves to the next end of a phase. ends[i] is when member i's phase ends, inf while it waits.

    rounds: nobody begins a rollout before everybody has begun as many in this run.
    busy_s: seconds times nodes that ROLLOUT and TRAIN ran, without switches, by phase; rollouts on the nodes of the job's
    training count with that.
    """

    __slots__ = ("now", "rounds", "members", "ends", "waiting", "held", "busy_s")

    def __init__(self, now: float = 0.0, rounds: bool = False) -> None:
        self.now = now
        self.rounds = rounds
        self.members: list[Member] = []
        self.ends: list[float] = []
        self.waiting: list[Member] = []
        self.held = 0
        self.busy_s = [0.0, 0.0, 0.0]

    def join(self, member: Member, load_s: float = 0.0) -> None:
        """The newcomer asks for its first rollout after `load_s`. Nodes it shares with nobody are loaded by its start."""
        member.finished = member.since = self.now
        member.turns = 0
        shared = 0
        for other in self.members:
            shared |= other.needs[ROLLOUT] | other.needs[TRAIN]
        member.resident = (member.needs[ROLLOUT] | member.needs[TRAIN]) & ~shared
        self.members.append(member)
        self.ends.append(math.inf)
        if load_s:
            member.phase, member.planned_s = LOADING, load_s
            self.ends[-1] = self.now + load_s
        else:
            member.phase = ROLLOUT
            self.waiting.append(member)

    def resume(self, member: Member, ends: float = math.inf) -> None:
        """Takes over a member as it stands in another run: its phase ends then, or waits in order of asking."""
        member.turns = 0
        self.members.append(member)
        self.ends.append(ends)
        if ends < math.inf:
            self.held |= member.needs[member.phase]
        else:
            self.waiting.append(member)
            self.waiting.sort(key=lambda m: m.since)

    def step(self) -> Member | None:
        """To the next end of a phase. Returns the member that finished an iteration with it, if any.

        Phases that may start do so only when time is about to move on, so that of several requests at one instant the
        order decides, not the order of events; and a job may leave between its last phase and its next one. But nodes that
        come free go to who waits for them before the job that gave them back asks for its next phase, whatever its rank.
        """
        ends = self.ends
        now = min(ends)
        if self.waiting and now > self.now:
            self._start()
            now = min(ends)
        self.now = now
        index = ends.index(now)
        member = self.members[index]
        phase = member.phase
        self.held &= ~member.needs[phase]
        if phase == ROLLOUT and member.has_tail:
            member.phase, member.since, member.planned_s = TAIL, now, next(member.times[TAIL])
            ends[index] = now + member.planned_s
            return None
        ends[index] = math.inf
        if any([waiting.rank for waiting in self.waiting]):
            self._start()
        member.since = now
        member.phase = TRAIN if phase in (ROLLOUT, TAIL) else ROLLOUT
        self.waiting.append(member)
        if phase != TRAIN:
            return None
        member.done += 1
        member.finished = now
        return member

    def next_end(self) -> float:
        """When `step` would arrive; phases that may start now are started."""
        now = min(self.ends, default=math.inf)
        if self.waiting and now > self.now:
            self._start()
            now = min(self.ends)
        return now

    def _start(self) -> None:
        taken, left = self.held, []
        turn = min([member.turns for member in self.members]) if self.rounds else 0
        ranked = any(member.rank for member in self.waiting)
        for member in sorted(self.waiting, key=lambda m: m.rank) if ranked else self.waiting:
            need = member.needs[member.phase]
            if self.rounds and member.phase == ROLLOUT and member.turns > turn:
                # Held back without a place in the queue: whoever it waits for must not wait for it.
                left.append(member)
                continue
            if need & taken:
                left.append(member)
            else:
                self._hold(member, need)
            taken |= need
        self.waiting = left if not ranked else sorted(left, key=lambda m: m.since)

    def _hold(self, member: Member, need: int) -> None:
        phase = member.phase
        seconds = next(member.times[phase])
        self.busy_s[TRAIN if need == member.needs[TRAIN] else phase] += seconds * need.bit_count()
        if member.resident & need != need:
            seconds += member.switch[phase]
            for other in self.members:
                other.resident &= ~need
            member.resident |= need
        self.held |= need
        member.turns += phase == ROLLOUT
        member.since = self.now
        member.planned_s = seconds
        self.ends[self.members.index(member)] = self.now + seconds
