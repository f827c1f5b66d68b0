"""Dividing many jobs into groups at the least cost: every set that is worth a group is priced, and a set-partition programme over
them is solved by HiGHS (through scipy)."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement.layouts import (
    EPSILON_USD,
    Find,
    SharedNodes,
    cheapest_alone,
    in_cheapest_modes,
    isolated_usd,
)
from verl_mux.placement.model import Cluster, JobSpec
from verl_mux.placement.repack import Part
from verl_mux.placement.rules import Rules

# Of more jobs no groups of more than MANY are looked at: there are most of those, and they save the least.
FEW_JOBS, MANY = 10, 4


class Divided(msgspec.Struct, frozen=True):
    """usd: per hour, or what else is counted (price.py). proven: no division into such groups costs less than that."""

    usd: float
    parts: list[Part]
    proven: float


class _Priced(msgspec.Struct, frozen=True):
    """usd: as in Divided, of these jobs, as a group or in the best way found to split one off. shared: None if splitting is no
    dearer."""

    usd: float
    shared: SharedNodes | None


class Division:
    """`solve` is asked about many sets of jobs; what sets cost by `find` is remembered."""

    def __init__(self, cluster: Cluster, find: Find, rules: Rules) -> None:
        self.cluster = cluster
        self.find = find
        self.rules = rules
        self._known: dict[tuple[str, ...], _Priced] = {}

    def solve(self, jobs: Sequence[JobSpec]) -> Divided:
        """Jobs sorted by name."""
        alone = [cheapest_alone(job, self.cluster, self.rules) for job in jobs]
        columns: list[tuple[float, Part]] = [(isolated_usd(job, self.cluster), ((job,), None)) for job in alone]
        most = self.rules.cap if len(jobs) <= FEW_JOBS else min(self.rules.cap, MANY)
        for size in range(2, min(most, len(jobs)) + 1):
            for members in itertools.combinations(jobs, size):
                if (shared := self._price(members).shared) is not None:
                    columns.append((shared.price, (shared.jobs, shared)))
        return _cheapest_cover(columns, jobs)

    def _price(self, jobs: tuple[JobSpec, ...]) -> _Priced:
        """Smaller sets have been priced before."""
        key = tuple([job.name for job in jobs])
        if key not in self._known:
            apart = min([self._usd(jobs[:i] + jobs[i + 1 :]) + self._usd((job,)) for i, job in enumerate(jobs)])
            shared = in_cheapest_modes(jobs, self.cluster, self.rules, self.find, apart - EPSILON_USD)
            self._known[key] = _Priced(shared.price if shared else apart, shared)
        return self._known[key]

    def _usd(self, jobs: tuple[JobSpec, ...]) -> float:
        if len(jobs) > 1:
            return self._price(jobs).usd
        return isolated_usd(cheapest_alone(jobs[0], self.cluster, self.rules), self.cluster)


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """HiGHS prints lines of its own now and then, past Python: to stderr, since programs read what we print."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _cheapest_cover(columns: Sequence[tuple[float, Part]], jobs: Sequence[JobSpec]) -> Divided:
    """Every job in just one group, at the least sum of prices."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array
    except ImportError as error:
        raise UserError("the optimum of more than 5 jobs needs scipy; install it, or leave the optimum out") from error
    number = {job.name: i for i, job in enumerate(jobs)}
    rows = [number[job.name] for _, (members, _) in columns for job in members]
    ends = np.cumsum([0, *(len(members) for _, (members, _) in columns)])
    cover = csc_array((np.ones(len(rows)), rows, ends), shape=(len(jobs), len(columns)))
    with _stdout_aside():
        found = milp(
            [usd for usd, _ in columns],
            integrality=np.ones(len(columns)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(cover, 1, 1),
        )
    chosen = [column for column, taken in zip(columns, found.x, strict=True) if taken > 0.5]
    return Divided(sum(usd for usd, _ in chosen), [part for _, part in chosen], found.mip_dual_bound)
