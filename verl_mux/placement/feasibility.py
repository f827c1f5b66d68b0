"""Whether the jobs of a group keep their SLOs: settled, while their phases vary, and as the group stands now.

Pure. Called by groups.py, divisions.py and placer.py; remembers verdicts, so that no case runs twice.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from verl_mux.placement.group_run import (
    LOADING,
    ROLLOUT,
    TAIL,
    TRAIN,
    GroupRun,
    Member,
    average,
    masks,
    periods,
    rollout_bits,
    state,
)
from verl_mux.placement.model import FIFO, ORDERS, Estimate, Group, JobSpec

TOLERANCE = 1 + 1e-9

# --- conflicts: pairs of jobs that share a node of one side, as the bits of an int ---
#
# All that FIFO queues, gangs and switches do to a group follows from these pairs and the jobs' times: a phase is held
# back exactly by phases of jobs it shares a node with, and pays a switch exactly if one of those ran since its last.

Pairs = int


def pair(a: int, b: int) -> Pairs:
    """The bit of the pair of jobs number a and b, whatever the size of the group."""
    low, high = (a, b) if a < b else (b, a)
    return 1 << (high * (high - 1) // 2 + low)


def pairs_of_nodes(on: Sequence[int]) -> Pairs:
    """The pairs that share a node. on: the nodes of each job as bits."""
    return sum(pair(a, b) for a in range(len(on)) for b in range(a) if on[a] & on[b])


@functools.lru_cache(maxsize=65536)
def nodes_of_pairs(pairs: Pairs, count: int) -> tuple[int, ...]:
    """For each of `count` jobs, one node (bit) per pair that it is in: nodes that bring about exactly these conflicts."""
    on = [0] * count
    for a in range(count):
        for b in range(a):
            both = pair(a, b)
            if pairs & both:
                on[a] |= both
                on[b] |= both
    return tuple(on)


@functools.lru_cache(maxsize=65536)
def within(pairs: Pairs, kept: tuple[int, ...]) -> Pairs:
    """The pairs among the jobs `kept`, renumbered by their place there."""
    found = ((i, j) for i in range(len(kept)) for j in range(i) if pairs & pair(kept[i], kept[j]))
    return sum(pair(i, j) for i, j in found)


@functools.lru_cache(maxsize=65536)
def connected(pairs: Pairs, count: int) -> tuple[tuple[int, ...], ...]:
    """The jobs, grouped by conflicts, direct or through others."""
    left, found = set(range(count)), []
    while left:
        reached = {left.pop()}
        frontier = list(reached)
        while frontier:
            a = frontier.pop()
            near = {b for b in left if pairs & pair(a, b)}
            left -= near
            reached |= near
            frontier += near
        found.append(tuple(sorted(reached)))
    return tuple(found)


def nodes_for(jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> tuple[Sequence[int], Sequence[int]]:
    """Nodes of rollouts and of training, as bits of one numbering, that bring about exactly these conflicts."""
    count = len(jobs)
    on_train = [bits << (count * (count - 1) // 2) for bits in nodes_of_pairs(train, count)]
    return rollout_bits(jobs, nodes_of_pairs(rollout, count), on_train), on_train


# --- settled periods, and phases that vary ---

_Placed = tuple[tuple[str, bool], ...]
# Mean seconds of an iteration of each job, if all keep their SLOs; none of jobs in several groups.
_Verdict = Sequence[float] | None
# Where planned periods take no larger part of what is allowed, phases may vary as they do.
SURE = 0.75


class Feasibility:
    """Remembers verdicts by the jobs as they are placed: `forget` a job when it leaves or when its estimates change.

    A way of sharing counts as feasible only if it stays so after every departure: the group without any one of its jobs must be
    feasible as well. With several nodes a departure can slow the others down (a scheduling anomaly); such groups are
    refused. It also means that most large groups are refused by a small one, without simulating them.

    keep: probability with which all must keep their SLOs while phases vary (see `likely`); 0: phases last as estimated.
    simulated: groups that were run.
    """

    def __init__(self, keep: float = 0.0) -> None:
        self.keep = keep
        self.simulated = 0
        # By the jobs as they are placed, sorted by name, then by the pairs that share rollout and training nodes.
        self._known: dict[_Placed, dict[tuple[Pairs, Pairs], _Verdict]] = {}
        self._sets: dict[str, list[_Placed]] = {}
        self._hopeless: dict[_Placed, Sequence[bool]] = {}  # pairs on rollout nodes, training nodes, both

    def allows(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs, order: str = FIFO) -> bool:
        """Whether all jobs keep their SLOs when these pairs share nodes; under another order than FIFO only while all stay."""
        if not rollout | train:
            return True
        ordered = _by_name(jobs, rollout, train)
        return (self._verdict(*ordered) if order == FIFO else self._kept_under(*ordered, order)) is not None

    def seconds(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> Sequence[float]:
        """The mean iteration of each job that is allowed. The jobs make one group and are sorted by name."""
        return self._verdict(jobs, rollout, train) or ()

    def hopeless_pairs(self, jobs: Sequence[JobSpec]) -> tuple[Pairs, Pairs, Pairs]:
        """Pairs that cannot even on their own share rollout nodes, training nodes, or both. Jobs sorted by name."""
        rollout = train = both = 0
        for low, high in itertools.combinations(range(len(jobs)), 2):
            placed = jobs[low].placed_as, jobs[high].placed_as
            if placed not in self._hopeless:
                two = jobs[low], jobs[high]
                self._hopeless[placed] = [self._verdict(two, *way) is None for way in ((1, 0), (0, 1), (1, 1))]
            hopeless, bit = self._hopeless[placed], pair(low, high)
            rollout, train, both = rollout | hopeless[0] * bit, train | hopeless[1] * bit, both | hopeless[2] * bit
        return rollout, train, both

    def forget(self, name: str) -> None:
        for placed in self._sets.pop(name, ()):
            self._known.pop(placed, None)
            self._hopeless.pop(placed, None)

    def _verdict(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> _Verdict:
        placed = tuple([job.placed_as for job in jobs])
        known = self._known.get(placed)
        if known is None:
            known = self._known[placed] = {}
            for job in jobs:
                self._sets.setdefault(job.name, []).append(placed)
        if (rollout, train) not in known:
            known[rollout, train] = self._judge(jobs, rollout, train)
        return known[rollout, train]

    def _judge(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> _Verdict:
        def of(kept: tuple[int, ...]) -> _Verdict:
            return self._verdict([jobs[i] for i in kept], within(rollout, kept), within(train, kept))

        count = len(jobs)
        groups = connected(rollout | train, count)
        if len(groups) > 1:
            return None if None in [of(kept) for kept in groups if len(kept) > 1] else ()
        for gone in range(count) if count > 2 else ():
            if of((*range(gone), *range(gone + 1, count))) is None:
                return None
        self.simulated += 1
        return self._kept_under(jobs, rollout, train, FIFO)

    def _kept_under(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs, order: str) -> _Verdict:
        """The mean iteration of each job under this order, if all keep their SLOs."""
        nodes = nodes_for(jobs, rollout, train)
        found = periods(jobs, *nodes, order)
        room = max(seconds / job.limit_s for job, seconds in zip(jobs, found, strict=True))
        kept = room <= TOLERANCE and (not self.keep or room < SURE or likely(jobs, *nodes, order, self.keep))
        return found if kept else None


def _by_name(jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> tuple[list[JobSpec], Pairs, Pairs]:
    """The order of arrival must not matter: from another start a group may settle otherwise (group_periods begins alike)."""
    rank = tuple(sorted(range(len(jobs)), key=lambda i: jobs[i].name))
    return [jobs[i] for i in rank], within(rollout, rank), within(train, rank)


PATHS, ITERATIONS = 8, 10


def likely(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int], order: str, keep: float) -> bool:
    """Whether all keep their SLOs with a probability of at least `keep`, as far as PATHS paths show.

    Each path draws, for every job, how far its estimates are off and how every single step varies (log-normal, by `unsure` and
    `cv` of its estimates), and runs the group. A job keeps its SLO on a path if its mean iteration there is at most `slo` times
    what the very same iterations take alone. Quantiles job by job would count every job slow at once; on a path a slow step of
    one job may meet a quick one of another, and waiting that adds up only where phases vary is seen. The same question has the
    same answer. rollout, train: nodes of each job as bits of one numbering.
    """
    if not any(estimate.cv or estimate.unsure for job in jobs for estimate in (job.rollout, job.train)):
        return True
    rng = random.Random("".join(job.name for job in jobs))
    broken, most = 0, math.floor((1 - keep) * PATHS)
    for _ in range(PATHS):
        broken += not _kept_on_a_path(jobs, rollout, train, order, rng)
        if broken > most:
            return False
    return True


def _kept_on_a_path(
    jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int], order: str, rng: random.Random
) -> bool:
    run = GroupRun()
    drawn: dict[str, list[float]] = {}
    for job, held, trained, rank in zip(jobs, rollout, train, ORDERS[order](jobs), strict=True):
        alone = drawn[job.name] = []
        rollouts = _draws(job.rollout, job.rollout_hold_s, rng, alone)
        times = rollouts, itertools.repeat(job.tail_s), _draws(job.train, job.train.seconds, rng, alone)
        run.join(Member(job, held, trained, rank, times))
    ends: dict[str, list[float]] = {job.name: [] for job in jobs}
    for _ in range(2 * ITERATIONS * len(jobs) * 3):
        if (member := run.step()) is not None:
            ends[member.name].append(run.now)
            if min(len(times) for times in ends.values()) >= ITERATIONS:
                break
    return all(_in_time(job, ends[job.name], drawn[job.name]) for job in jobs)


def _in_time(job: JobSpec, ends: Sequence[float], drawn: Sequence[float]) -> bool:
    """Counted from the end of the first iteration: how all begin at once says nothing."""
    if len(ends) < 2:
        return False
    alone = sum(drawn[2 : 2 * len(ends)]) + job.tail_s * (len(ends) - 1)
    return ends[-1] - ends[0] <= job.slo * alone * TOLERANCE


def _draws(estimate: Estimate, seconds: float, rng: random.Random, drawn: list[float]) -> Iterator[float]:
    """Endless; each is appended to `drawn`."""
    mean = seconds * _factor(rng, estimate.unsure)
    while True:
        drawn.append(mean * _factor(rng, estimate.cv))
        yield drawn[-1]


def _factor(rng: random.Random, cv: float) -> float:
    """Log-normal, of mean 1 and this standard deviation."""
    if not cv:
        return 1.0
    spread = math.log1p(cv * cv)
    return math.exp(rng.gauss(-spread / 2, math.sqrt(spread)))


# --- a group as it stands now, run forward ---

ITERATIONS_AHEAD = 24
# Two jobs whose iterations take almost the same time meet once in many of them, and then at every one. So a job with little
# slack in its pace is followed further.
FAR_AHEAD, TIGHT = 400, 0.97
PHASES = {"rollout": ROLLOUT, "tail": TAIL, "train": TRAIN, "loading": LOADING}


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a placed job stands.

    age_s: since it was placed. done: iterations finished. phase: `loading`, `rollout`, `tail` or `train`, which runs for
    remaining_s more, or has waited for waited_s (remaining_s None). warm: rollout and training nodes that the job was the last to
    hold; None: unknown. solo_s: what the finished iterations would have taken alone, as they really were; None: as estimated now.
    seen: iterations whose phases its estimates may know; None: all that are done. left: iterations still to do, as the job says;
    None: it does not say.
    """

    age_s: float = 0.0
    done: int = 0
    phase: str = "rollout"
    remaining_s: float | None = None
    waited_s: float = 0.0
    warm: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    solo_s: float | None = None
    seen: int | None = None
    left: int | None = None

    def left_s(self, job: JobSpec) -> float | None:
        """Seconds that the rest of the job would take alone; None: it does not say."""
        return None if self.left is None else self.left * job.iteration_s

    def allowed_s(self, job: JobSpec, more: int) -> float:
        """The most that may have passed since it was placed when it has done `more` iterations more."""
        if self.solo_s is None:
            return job.limit_s * (self.done + more)
        return job.slo * self.solo_s + job.limit_s * more


def late_job(group: Group, progress: Mapping[str, Progress], loads: Mapping[str, float]) -> str | None:
    """The first job that would, at the end of one of its next iterations, have taken longer over its life than its
    SLO allows; None if all keep their SLOs. loads: jobs that first start cold there, and for how long."""
    run = _run(group, progress, loads)
    jobs = {job.name: job for job in group.jobs}
    first = {name: progress.get(name, Progress()) for name in jobs}
    lead = run.members[0]
    seen: dict[tuple, tuple[float, list[int]]] = {}
    ends: dict[str, list[float]] = {name: [] for name in jobs}
    near, far = 3 * ITERATIONS_AHEAD * len(jobs), 3 * FAR_AHEAD * len(jobs)
    for at_step in range(far):
        if at_step == near and not any(average(times) > jobs[name].limit_s * TIGHT for name, times in ends.items()):
            return None
        member = run.step()
        if member is None:
            continue
        ends[member.name].append(run.now)
        before = first[member.name]
        if before.age_s + run.now > before.allowed_s(jobs[member.name], member.done) * TOLERANCE:
            return member.name
        if member is lead:
            done = [m.done for m in run.members]
            if (at := state(run)) in seen:
                # It goes on like this for ever. Where a group settles depends on where it starts, so a job can do too few
                # iterations in a cycle of a group whose settled periods, from a common start, are all right.
                since, had = seen[at]
                cycles = zip(group.jobs, had, done, strict=True)
                return next((j.name for j, b, d in cycles if run.now - since > j.limit_s * (d - b) * TOLERANCE), None)
            seen[at] = run.now, done
    # No cycle in sight: slack may hide that a job loses a little of it with every iteration.
    return next((name for name, times in ends.items() if average(times) > jobs[name].limit_s * TOLERANCE), None)


def _run(group: Group, progress: Mapping[str, Progress], loads: Mapping[str, float]) -> GroupRun:
    run = GroupRun()
    rollout, train = masks(group)
    for job, held, trained, rank in zip(group.jobs, rollout, train, ORDERS[group.order](group.jobs), strict=True):
        member = Member(job, held, trained, rank)
        if job.name in loads or job.name not in progress:
            run.join(member, loads.get(job.name, 0.0))
            continue
        at = progress[job.name]
        member.phase = PHASES[at.phase]
        member.since = -at.waited_s
        member.resident = _resident(group, at, member)
        run.resume(member, math.inf if at.remaining_s is None else at.remaining_s)
    return run


def _resident(group: Group, at: Progress, member: Member) -> int:
    """Nodes it is loaded on; if that is not known, those it runs on."""
    if at.warm is None:
        return member.needs[member.phase] if at.remaining_s is not None else 0
    warm = [(group.rollout_nodes, at.warm[0]), (group.train_nodes, at.warm[1])]
    bits = [node in on for nodes, on in warm for node in nodes]
    return sum(1 << i for i, is_warm in enumerate(bits) if is_warm)
