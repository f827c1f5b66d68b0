"""A group as it stands now, run forward: will every job be within its SLO whenever it should end?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from verl_mux.placement.model import Group, JobSpec
from verl_mux.placement.time.feasibility import TOLERANCE
from verl_mux.placement.time.group_run import LOADING, ROLLOUT, TAIL, TRAIN, GroupRun, Member
from verl_mux.placement.time.order import IN_ROUNDS, ORDERS
from verl_mux.placement.time.periods import masks, planned_member, state
from verl_mux.placement.time.settled import average

ITERATIONS_AHEAD = 24
# Two jobs whose iterations take almost the same time meet once in many of them, and then at every one. So who has little
# slack in its pace is followed further.
FAR_AHEAD, TIGHT = 400, 0.97
PHASES = {"rollout": ROLLOUT, "tail": TAIL, "train": TRAIN, "loading": LOADING}


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a placed job stands. age_s: since it was placed. done: iterations finished. phase: `loading`, `rollout`,
    `tail` or `train`, which it runs for remaining_s more, or waits for since waited_s ago (remaining_s None).
    warm: rollout and training nodes that it was the last to hold; None if unknown. solo_s: what the finished iterations would
    have taken alone, as they really were; None: as estimated now. seen: iterations whose phases its estimates may know; None: all
    that are done. left: iterations still to do, as the job says; None: it does not say."""

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
        """What it still has to do would take alone; None: it does not say."""
        return None if self.left is None else self.left * job.iteration_s

    def allowed_s(self, job: JobSpec, more: int) -> float:
        """At most this may have passed since it was placed when it has done so many more iterations."""
        if self.solo_s is None:
            return job.limit_s * (self.done + more)
        return job.slo * self.solo_s + job.limit_s * more


class Without(Mapping[str, Progress]):
    """The progress of all but these jobs. What is under it may be found only when it is asked for, so nothing is copied."""

    def __init__(self, under: Mapping[str, Progress], gone: Collection[str]) -> None:
        self._under = under
        self._gone = gone

    def __getitem__(self, name: str) -> Progress:
        if name in self._gone:
            raise KeyError(name)
        return self._under[name]

    def __contains__(self, name: object) -> bool:
        return name not in self._gone and name in self._under

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._under if name not in self._gone)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def late_job(group: Group, progress: Mapping[str, Progress], loads: Mapping[str, float]) -> str | None:
    """The first job that would, at the end of one of its next iterations, have taken longer over its life than its
    SLO allows; None if all keep within it. `loads`: jobs that first start cold there, and for how long."""
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
                since, before_done = seen[at]
                return _falling_behind(group.jobs, run.now - since, before_done, done)
            seen[at] = run.now, done
    # No cycle in sight: slack may hide that somebody loses a little of it with every iteration.
    return next((name for name, times in ends.items() if average(times) > jobs[name].limit_s * TOLERANCE), None)


def _falling_behind(jobs: Sequence[JobSpec], cycle_s: float, before: Sequence[int], after: Sequence[int]) -> str | None:
    """A job that does too few iterations in a cycle that goes on for ever. Where a group settles depends on where it
    starts, so this can happen in a group whose settled periods, from a common start, are all right."""
    for job, done, done_after in zip(jobs, before, after, strict=True):
        if cycle_s > job.limit_s * (done_after - done) * TOLERANCE:
            return job.name
    return None


def _run(group: Group, progress: Mapping[str, Progress], loads: Mapping[str, float]) -> GroupRun:
    run = GroupRun(rounds=group.order in IN_ROUNDS)
    rollout, train = masks(group)
    for job, held, trained, rank in zip(group.jobs, rollout, train, ORDERS[group.order](group.jobs), strict=True):
        member = planned_member(job, held, trained, rank)
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
