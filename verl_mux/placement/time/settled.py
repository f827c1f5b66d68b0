"""Settled mean periods under FIFO: the events of group_run.py in one plain loop, for the many groups a search looks at.

Same rules and same answers as `periods.periods` for order `fifo` without tails (the tests compare them), without the
objects, several times faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from verl_mux.placement.model import JobSpec

# A group that has not repeated a state by then is averaged over its second half.
MAX_ITERATIONS = 48


def fifo_means(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int]) -> list[float]:
    """Seconds per iteration of each job; all ask for their first rollout at 0, in the order given.

    rollout, train: nodes of each job as bits of one numbering; the same ones for a job that is colocated."""
    count = len(jobs)
    need = [*rollout, *train]
    hold = [job.rollout_hold_s for job in jobs] + [job.train.seconds for job in jobs]
    switch = [job.rollout_switch_s for job in jobs] + [job.train_switch_s for job in jobs]
    resident = _loaded(rollout, train)
    others = [[j for j in range(count) if j != i and (rollout[i] | train[i]) & (rollout[j] | train[j])] for i in range(count)]
    never = math.inf
    now, held = 0.0, 0
    ends = [never] * count
    # Which phase each job is in or waits for: i in rollout, i + count in training.
    at = list(range(count))
    waiting = list(range(count))
    finished: list[list[float]] = [[] for _ in jobs]
    seen: dict[tuple, tuple[float, list[int]]] = {}
    for _ in range(MAX_ITERATIONS * 2 * count):
        until = min(ends)
        if waiting and until > now:
            taken, left = held, []
            for i in waiting:
                phase = at[i]
                nodes = need[phase]
                if nodes & taken:
                    left.append(i)
                else:
                    seconds = hold[phase]
                    if resident[i] & nodes != nodes:
                        seconds += switch[phase]
                        resident[i] |= nodes
                        for j in others[i]:
                            resident[j] &= ~nodes
                    held |= nodes
                    ends[i] = now + seconds
                taken |= nodes
            waiting = left
            until = min(ends)
        now = until
        i = ends.index(now)
        held &= ~need[at[i]]
        ends[i] = never
        waiting.append(i)
        if at[i] < count:
            at[i] += count
            continue
        at[i] -= count
        finished[i].append(now)
        if i == 0:
            done = [len(times) for times in finished]
            state = (*at, *resident, *waiting, *[round(end - now, 6) for end in ends if end < never])
            if state in seen:
                since, before = seen[state]
                return [(now - since) / (d - b) if d > b else never for d, b in zip(done, before, strict=True)]
            seen[state] = now, done
    return [average(times) for times in finished]


def average(finished: Sequence[float]) -> float:
    """Mean time between the later half of these ends; over all of them, from 0, if they are too few to halve."""
    if not finished:
        return math.inf
    later = finished[(len(finished) - 1) // 2 :] if len(finished) > 2 else [0.0, *finished]
    return (later[-1] - later[0]) / (len(later) - 1)


def _loaded(rollout: Sequence[int], train: Sequence[int]) -> list[int]:
    """Nodes that a job's start loads: those that nobody before it has taken, as GroupRun.join has it."""
    loaded, taken = [], 0
    for nodes in map(int.__or__, rollout, train):
        loaded.append(nodes & ~taken)
        taken |= nodes
    return loaded
