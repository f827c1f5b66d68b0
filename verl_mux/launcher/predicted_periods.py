"""What the coordinator predicted for the groups it formed, beside what their steps took."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median

import msgspec

from verl_mux.launcher.timeline import Timeline
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import read_directory

# A period from fewer gaps between steps says nothing.
_LEAST_GAPS = 2


class Prediction(msgspec.Struct, frozen=True):
    """A `group_predicted` line. at: seconds since the epoch. source: `estimated` before, `observed` after its first steps
    together. periods: seconds per step, by job."""

    at: float
    group: str
    source: str
    periods: dict[str, float]
    nodes: dict[str, list[str]]
    usd_per_hour: float


def read(directory: Path) -> list[Prediction]:
    """In order of time, from the coordinator's event log of a run."""
    told = ("group", "source", "periods", "nodes", "usd_per_hour")
    found = [
        Prediction(at=line.end, **{name: line.extra[name] for name in told})
        for line in read_directory(directory / "coordinator" / "events")
        if line.event == events.GROUP_PREDICTED
    ]
    return sorted(found, key=lambda prediction: prediction.at)


def groups(predictions: list[Prediction], timeline: Timeline) -> list[dict]:
    """One entry per group of jobs that ran together long enough: the period predicted once all of them had been seen for
    a few steps, and the median period of their steps from then on, as long as the group stayed as it was.
    """
    found = []
    for first, stay in _stays(predictions):
        observed = next((p for p in stay if p.source == "observed"), None)
        if observed is None:
            continue
        until = next((p.at for p in predictions if p.at > first.at and _regroups(p, first)), float("inf"))
        if measured := _measured(observed, until, timeline):
            found.append(_entry(first, observed, measured))
    return found


def _stays(predictions: list[Prediction]) -> Iterator[tuple[Prediction, list[Prediction]]]:
    """Predictions for one and the same set of jobs on the same nodes, until another takes one of them up."""
    stays: list[list[Prediction]] = []
    latest: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        jobs = _jobs(prediction)
        stay = latest.get(next(iter(jobs)))
        if stay is None or not _is_same(stay[0], prediction) or any(latest.get(job) is not stay for job in jobs):
            stays.append(stay := [])
        stay.append(prediction)
        latest.update(dict.fromkeys(jobs, stay))
    yield from ((stay[0], stay) for stay in stays)


def _jobs(prediction: Prediction) -> frozenset[str]:
    return frozenset(prediction.periods)


def _regroups(later: Prediction, earlier: Prediction) -> bool:
    return not _is_same(later, earlier) and not _jobs(later).isdisjoint(_jobs(earlier))


def _is_same(one: Prediction, other: Prediction) -> bool:
    return _jobs(one) == _jobs(other) and one.nodes == other.nodes


def _measured(prediction: Prediction, until: float, timeline: Timeline) -> dict[str, tuple[float, int]] | None:
    """Median seconds from one step's end to the next, and how many, of each job; None if one of them has too few."""
    steps = {job: timeline.of(job, "steps") for job in prediction.periods}
    if not all(steps.values()):
        return None
    until = min(until, *(spans[-1].end for spans in steps.values()))
    measured = {}
    for job, spans in steps.items():
        ends = [span.end for span in spans if prediction.at <= span.end <= until]
        if len(ends) <= _LEAST_GAPS:
            return None
        measured[job] = (median(b - a for a, b in itertools.pairwise(ends)), len(ends) - 1)
    return measured


def _entry(first: Prediction, observed: Prediction, measured: Mapping[str, tuple[float, int]]) -> dict:
    predicted, seen = fmean(observed.periods.values()), fmean(seconds for seconds, _ in measured.values())
    jobs = {
        job: {"predicted_period_s": round(observed.periods[job], 4), "measured_period_s": round(seconds, 4), "steps": count}
        for job, (seconds, count) in measured.items()
    }
    return {
        "group": observed.group,
        "nodes": observed.nodes,
        "usd_per_hour": round(observed.usd_per_hour, 4),
        "predicted_period_s": round(predicted, 4),
        "measured_period_s": round(seen, 4),
        "difference": round(predicted / seen - 1, 4),
        "period_bound_s": round(fmean(first.periods.values()), 4),
        "jobs": jobs,
    }
