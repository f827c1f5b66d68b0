"""Divisions counted out one by one, for the optimum to be compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from verl_mux.placement.model import JobSpec

Nodes = tuple[frozenset[int], ...]  # of one side: who is on each node
Together = tuple[bool, ...]  # of each job: both phases run on training nodes
ROUNDS = 96


def cheapest_usd(jobs: Sequence[JobSpec], usd: tuple[float, float], most_gb: float, cap: int) -> float:
    """USD per hour. jobs: sorted by name. usd: of a rollout and of a training node."""
    priced = []
    for together in itertools.product(*[[mode == "colocated" for mode in job.modes] for job in jobs]):
        sides = [list(_fitting(jobs, together, side, most_gb)) for side in (0, 1)]
        priced += [(len(r) * usd[0] + len(t) * usd[1], together, r, t) for r, t in itertools.product(*sides)]
    known: dict[tuple, bool] = {}
    return next(found[0] for found in sorted(priced, key=lambda found: found[0]) if _all_in_time(jobs, *found[1:], cap, known))


def _fitting(jobs: Sequence[JobSpec], together: Together, side: int, most_gb: float) -> Iterator[Nodes]:
    """Each job on as many different nodes as it needs; nodes have no names, so they are sorted and none come twice."""
    found: set[tuple[tuple[int, ...], ...]] = {()}
    states = []
    for number, (job, both) in enumerate(zip(jobs, together, strict=True)):
        need = (0 if both else job.rollout_nodes, job.train_nodes)[side]
        states.append((job.rollout_memory_gb, job.train_memory_gb + both * job.rollout_memory_gb)[side])
        grown = set()
        for nodes in found:
            room = [*nodes, *[()] * need]
            for chosen in itertools.combinations(range(len(room)), need):
                after = [(*on, number) if i in chosen else on for i, on in enumerate(room)]
                grown.add(tuple(sorted(on for on in after if on)))
        found = grown
    for nodes in found:
        if all(sum(states[i] for i in on) <= most_gb for on in nodes):
            yield tuple(frozenset(on) for on in nodes)


def _all_in_time(
    jobs: Sequence[JobSpec], together: Together, rollout: Nodes, train: Nodes, cap: int, known: dict[tuple, bool]
) -> bool:
    for group in _groups(len(jobs), [*rollout, *train]):
        if len(group) > cap:
            return False
        sharing = _pairs(rollout, group), _pairs(train, group)
        both = tuple(together[i] for i in sorted(group))
        key = (group, both, *sharing)
        if key not in known:
            known[key] = _keeps([jobs[i] for i in sorted(group)], both, sorted(group), sharing)
        if not known[key]:
            return False
    return True


def _pairs(nodes: Nodes, group: frozenset[int]) -> frozenset[tuple[int, int]]:
    return frozenset(pair for on in nodes for pair in itertools.combinations(sorted(on & group), 2))


def _groups(count: int, nodes: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    groups = [frozenset([i]) for i in range(count)]
    for on in nodes:
        met = [group for group in groups if group & on]
        groups = [group for group in groups if not group & on] + ([frozenset().union(*met)] if met else [])
    return groups


def _keeps(jobs: list[JobSpec], together: Together, names: list[int], sharing: tuple[frozenset, frozenset]) -> bool:
    """One queue for each node, first come first served; the next phase is asked for when the one before it ends."""
    if len(jobs) == 1:
        return True
    count, place = len(jobs), {name: i for i, name in enumerate(names)}
    apart = [[set() for _ in jobs], [set() for _ in jobs]]
    for side in (0, 1):
        for a, b in sharing[side]:
            apart[side][place[a]].add(place[b])
            apart[side][place[b]].add(place[a])
    times = [[j.sync_s + j.rollout.seconds for j in jobs], [j.train.seconds for j in jobs]]
    switch = [[j.rollout_switch_s for j in jobs], [j.train_switch_s for j in jobs]]
    # Who was the last on what two jobs share on a side; the first in order of names has it loaded.
    last = {(side, frozenset((a, b))): min(a, b) for side in (0, 1) for a in range(count) for b in apart[side][a]}
    queue, running, now = [(i, 0) for i in range(count)], {}, 0.0
    ends: list[list[float]] = [[] for _ in jobs]
    seen: dict[tuple, tuple[float, list[int]]] = {}
    for _ in range(ROUNDS * count):
        if not running or min(running.values()) > now:  # what ends at the same time is heard first
            queue = _begin(queue, running, now, together, apart, times, switch, last)
        now = min(running.values())
        done = min(key for key, end in running.items() if end == now)
        del running[done]
        queue.append((done[0], 1 - done[1]))
        if done[1] == 1:
            ends[done[0]].append(now)
            if done[0] == 0:
                left = tuple(sorted((phase, round(end - now, 6)) for phase, end in running.items()))
                state = tuple(queue), left, tuple(last.values())
                if state in seen:
                    since, before = seen[state]
                    per = [len(e) - b for e, b in zip(ends, before, strict=True)]
                    return all(n and (now - since) / n <= j.limit_s * (1 + 1e-9) for n, j in zip(per, jobs, strict=True))
                seen[state] = now, [len(e) for e in ends]
    return all(_mean(e) <= j.limit_s * (1 + 1e-9) for e, j in zip(ends, jobs, strict=True))


def _begin(queue, running, now, together, apart, times, switch, last) -> list[tuple[int, int]]:
    """Whoever stands behind nobody that it shares a node with, and whose nodes are free."""
    left: list[tuple[int, int]] = []
    for job, side in queue:
        where = 1 if together[job] else side
        rivals = apart[where][job]
        against = [(other, phase) for other in rivals for phase in (0, 1) if (1 if together[other] else phase) == where]
        if any(phase in running or phase in left for phase in against):
            left.append((job, side))
            continue
        cold = any(last[where, frozenset((job, other))] != job for other in rivals)
        for other in rivals:
            last[where, frozenset((job, other))] = job
        running[job, side] = now + times[side][job] + (switch[side][job] if cold else 0.0)
    return left


def _mean(ends: list[float]) -> float:
    later = ends[(len(ends) - 1) // 2 :] if len(ends) > 2 else [0.0, *ends]
    return (later[-1] - later[0]) / (len(later) - 1) if len(later) > 1 else float("inf")
