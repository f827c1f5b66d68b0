"""A co-execution group in virtual time: the one engine behind every predicted and every simulated period.

    [LOADING] -> WAITING(rollout) -> ROLLOUT -> [TAIL] -> WAITING(train) -> TRAIN -> (one more iteration) WAITING(rollout)

Pure. Run by feasibility.py, groups.py, the coordinator and `verl-mux plan` for predictions, and by research/ to carry simulated
jobs out. Invariants (asserted by the tests):
- a phase holds all its nodes or none, and no node is held twice;
- no phase starts before an earlier-ranked waiting phase that needs one of its nodes;
- a node pays the switch exactly when another job held it last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from verl_mux.placement.model import ORDERS, Group, JobSpec

# LOADING is a cold start; TAIL is the end of a rollout that no longer holds the nodes.
ROLLOUT, TAIL, TRAIN, LOADING = 0, 1, 2, 3
# A group that has not repeated a state after this many iterations is averaged over their second half.
MAX_ITERATIONS = 48

Times = tuple[Iterator[float], Iterator[float], Iterator[float]]


class Member:
    """One job in a run, and where it stands. Nodes are bits of an int, all nodes in one numbering.

    needs: nodes held in each phase. times: endless seconds for ROLLOUT, TAIL and TRAIN; without them phases take their estimates.
    switch: seconds a phase lasts longer when another job held one of its nodes last. rank: see `ORDERS` in model.py.
    phase: the one it runs or waits for. since: when that was asked for or, if it runs, started. resident: nodes that this job was
    the last to hold. done: iterations finished, the last of them at `finished`.
    """

    __slots__ = ("name", "needs", "times", "switch", "rank", "has_tail", "phase", "since", "resident", "done", "finished")

    def __init__(self, job: JobSpec, rollout: int, train: int, rank: int = 0, times: Times | None = None) -> None:
        self.name = job.name
        self.needs = (rollout, 0, train, 0)
        repeat = itertools.repeat
        self.times = times or (repeat(job.rollout_hold_s), repeat(job.tail_s), repeat(job.train.seconds))
        self.switch = (job.rollout_switch_s, 0.0, job.train_switch_s, 0.0)
        self.rank = rank
        self.has_tail = job.tail_s > 0
        self.phase = ROLLOUT
        self.since = self.finished = 0.0
        self.resident = self.done = 0


class GroupRun:
    """`step()` moves to the next end of a phase. ends[i]: when the phase of member i ends, inf while it waits.

    busy_s: seconds times nodes that ROLLOUT and TRAIN ran, without switches, by phase; rollouts on the training nodes of their
    job count as TRAIN.
    """

    __slots__ = ("now", "members", "ends", "waiting", "held", "busy_s")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.members: list[Member] = []
        self.ends: list[float] = []
        self.waiting: list[Member] = []
        self.held = 0
        self.busy_s = [0.0, 0.0, 0.0]

    def join(self, member: Member, load_s: float = 0.0) -> None:
        """Add a member that asks for its first rollout after `load_s`. Its start loads the nodes that no other member needs."""
        member.finished = member.since = self.now
        shared = 0
        for other in self.members:
            shared |= other.needs[ROLLOUT] | other.needs[TRAIN]
        member.resident = (member.needs[ROLLOUT] | member.needs[TRAIN]) & ~shared
        self.members.append(member)
        self.ends.append(math.inf)
        if load_s:
            member.phase = LOADING
            self.ends[-1] = self.now + load_s
        else:
            member.phase = ROLLOUT
            self.waiting.append(member)

    def resume(self, member: Member, ends: float = math.inf) -> None:
        """Add a member as it stands in another run: its phase ends at `ends`, or waits in order of asking."""
        self.members.append(member)
        self.ends.append(ends)
        if ends < math.inf:
            self.held |= member.needs[member.phase]
        else:
            self.waiting.append(member)
            self.waiting.sort(key=lambda m: m.since)

    def step(self) -> Member | None:
        """Move to the next end of a phase. Returns the member that finished an iteration with it, if any.

        Phases that may start do so only when time is about to move on, so that of several requests at one instant the
        order decides, not the order of events; and a job may leave between its last phase and its next one. But freed nodes
        go to a waiting phase before the job that freed them asks for its next phase, whatever its rank.
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
            member.phase, member.since = TAIL, now
            ends[index] = now + next(member.times[TAIL])
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
        ranked = any([member.rank for member in self.waiting])
        for member in sorted(self.waiting, key=lambda m: m.rank) if ranked else self.waiting:
            need = member.needs[member.phase]
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
        member.since = self.now
        self.ends[self.members.index(member)] = self.now + seconds


# --- settled periods: T_coexec, how long an iteration of each job lasts once the group has settled ---
#
# Strict rounds (every job once per cycle) are not what one FIFO queue per node does: with private rollout nodes a short
# job overtakes a long one. So the period comes from the events themselves, except where any two jobs share nodes on both
# sides: there FIFO never lets one overtake another, and the period of all of them is the largest of the busiest node's
# work per round and the longest single iteration (checked against the events by the tests).


def group_periods(group: Group) -> dict[str, float]:
    """The settled period of each job by name, in seconds, under the group's own order. All begin at once, in order of their
    names: the same course by which feasibility.py judges a group, which may settle otherwise from another start."""
    jobs, (rollout, train) = group.jobs, masks(group)
    rank = sorted(range(len(jobs)), key=lambda i: jobs[i].name)
    settled = periods([jobs[i] for i in rank], [rollout[i] for i in rank], [train[i] for i in rank], group.order)
    by_name = {jobs[i].name: period for i, period in zip(rank, settled, strict=True)}
    return {job.name: by_name[job.name] for job in jobs}


def masks(group: Group) -> tuple[list[int], list[int]]:
    """The nodes of each pin for a rollout and for training as bits of one numbering, training nodes after the rollout nodes."""
    bits = {node: 1 << i for i, node in enumerate(group.rollout_nodes)}
    train_bits = {node: 1 << i for i, node in enumerate(group.train_nodes, start=len(bits))}
    rollout = [sum(bits[node] for node in pin.rollout) for pin in group.pins]
    train = [sum(train_bits[node] for node in pin.train) for pin in group.pins]
    return rollout_bits(group.jobs, rollout, train), train


def rollout_bits(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int]) -> list[int]:
    """The nodes (bits) on which each job's rollouts run: its training nodes if it is colocated."""
    return [trained if job.colocated else held for job, held, trained in zip(jobs, rollout, train, strict=True)]


def periods(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int], order: str = "fifo") -> list[float]:
    """As `group_periods`, with nodes as bits; `rollout`: those on which rollouts run, training nodes only of colocated jobs."""
    if len(jobs) == 1:
        return [jobs[0].iteration_s]
    if order == "fifo" and _in_one_round(jobs, rollout, train):
        return [_one_round(jobs)] * len(jobs)
    return settle(planned_run(jobs, rollout, train, order))


def _in_one_round(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int]) -> bool:
    """Whether no job can overtake another, and rollouts run beside training."""
    all_meet = all(a & b for on in (rollout, train) for a, b in itertools.combinations(on, 2))
    return all_meet and not any(job.tail_s or job.colocated for job in jobs)


def _one_round(jobs: Sequence[JobSpec]) -> float:
    held = [job.rollout_hold_s + job.rollout_switch_s for job in jobs]
    trained = [job.train.seconds + job.train_switch_s for job in jobs]
    return max(sum(held), sum(trained), *(h + t for h, t in zip(held, trained, strict=True)))


def planned_run(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int], order: str) -> GroupRun:
    """A run in which all jobs ask for their first rollout at 0, in the order given, and every phase takes its estimate."""
    run = GroupRun()
    for job, held, trained, rank in zip(jobs, rollout, train, ORDERS[order](jobs), strict=True):
        run.join(Member(job, held, trained, rank))
    return run


def settle(run: GroupRun) -> list[float]:
    """Run until a state repeats, and average over the cycle between; else over the second half of MAX_ITERATIONS."""
    members = run.members
    ends: dict[Member, list[float]] = {member: [] for member in members}
    seen: dict[tuple, tuple[float, list[int]]] = {}
    # A member that starves would never get there: the others' events are bounded as well.
    for _ in range(MAX_ITERATIONS * 2 * len(members)):
        member = run.step()
        if member is None:
            continue
        ends[member].append(run.now)
        if member is members[0]:
            done = [m.done for m in members]
            if (at := state(run)) in seen:
                since, before = seen[at]
                rounds = [after - b for after, b in zip(done, before, strict=True)]
                return [(run.now - since) / each if each else math.inf for each in rounds]
            seen[at] = run.now, done
    return [average(times) for times in ends.values()]


def average(finished: Sequence[float]) -> float:
    """Mean time between the later half of these ends; over all of them, from 0, if they are too few to halve."""
    if not finished:
        return math.inf
    later = finished[(len(finished) - 1) // 2 :] if len(finished) > 2 else [0.0, *finished]
    return (later[-1] - later[0]) / (len(later) - 1)


def state(run: GroupRun) -> tuple:
    """What the future depends on, times relative to now and to a microsecond."""
    now = run.now
    return (
        *[(m.phase, m.resident) for m in run.members],
        *[round(end - now, 6) for end in run.ends if end < math.inf],
        *[m.name for m in run.waiting],
    )
