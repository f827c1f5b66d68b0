"""In which order the waiting phases of a group start. One function per order, one line each in ORDERS.

An order ranks the jobs: among waiting phases the lowest rank goes first, equal ranks in order of arrival. Whatever the
order, a phase starts when no phase before it needs one of its nodes and all of them are free: all at once or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl_mux.placement.model import JobSpec


def fifo(jobs: Sequence[JobSpec]) -> list[int]:
    """One queue per node, first come first served (the paper's runtime)."""
    return [0] * len(jobs)


def rounds(jobs: Sequence[JobSpec]) -> list[int]:
    """First come first served, but nobody begins a rollout before everybody has begun as many (the paper's
    meta-iteration). Over several nodes FIFO lets a short job overtake and then stand in a long one's way."""
    return fifo(jobs)


def longest_first(jobs: Sequence[JobSpec]) -> list[int]:
    """The longest iteration alone goes first: it sets the cycle, the others fit into its bubbles."""
    return _ranks([-job.iteration_s for job in jobs])


def tightest_first(jobs: Sequence[JobSpec]) -> list[int]:
    """The least room between the iteration alone and its SLO goes first."""
    return _ranks([job.limit_s - job.iteration_s for job in jobs])


def _ranks(keys: Sequence[float]) -> list[int]:
    ordered = sorted(keys)
    return [ordered.index(key) for key in keys]


ORDERS: dict[str, Callable[[Sequence[JobSpec]], list[int]]] = {
    "fifo": fifo,
    "rounds": rounds,
    "longest-first": longest_first,
    "tightest-first": tightest_first,
}
# Orders that GroupRun keeps in step.
IN_ROUNDS = frozenset(("rounds",))
