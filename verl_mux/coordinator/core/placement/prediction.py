"""The periods that placed jobs should have: from estimates when a group forms, from what was seen of it later. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from verl_mux.coordinator.core.inputs_and_instructions import Log
from verl_mux.coordinator.core.records import Job, State, Watched
from verl_mux.coordinator.core.settings import Config
from verl_mux.placement.estimator import Observed, expected
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.model import Group, JobSpec, Pin
from verl_mux.placement.planner import pair_of
from verl_mux.profiling.eventlog import events


def expected_job(job: JobSpec, watched: Watched) -> JobSpec:
    """With the median times of the steps since its group changed; with those it is placed by, where there are none."""
    seen, last = watched.observed, watched.fresh
    if last == 0:
        return job
    recent = Observed(rollout=seen.rollout[-last:], train=seen.train[-last:], between=seen.between[-last:])
    return expected(job, recent)


def expected_group(group: Group, state: State) -> Group:
    pins = tuple(
        Pin(job=expected_job(pin.job, state.watched_of(pin.job.name)), rollout=pin.rollout, train=pin.train) for pin in group.pins
    )
    return msgspec.structs.replace(group, pins=pins)


def predict(group: Group, state: State) -> dict[str, float]:
    """Seconds per step of each job, by name."""
    return {job.name: period.mean_s for job, period in zip(group.jobs, group_periods(expected_group(group, state)), strict=True)}


def source(group: Group, state: State, config: Config) -> str:
    """`observed` once every job of the group was seen for as many steps as the configuration asks; else `estimated`."""
    fresh = (state.watched_of(job.name).fresh for job in group.jobs)
    return "observed" if all(steps >= config.placing.observe for steps in fresh) else "estimated"


def is_due(group: Group, job: Job, state: State, config: Config) -> bool:
    """Whether this step of the job was the last that the first prediction from observations waited for."""
    mine = state.watched_of(job.name).fresh == config.placing.observe
    others_later = all(state.watched_of(other.name).fresh >= config.placing.observe for other in group.jobs)
    return mine and others_later


def predicted(group: Group, state: State, config: Config) -> Log:
    """The line for the event log, against which the periods that follow are held."""
    return Log(events.GROUP_PREDICTED, {"group": group.name, **about(group, state, config)})


def about(group: Group, state: State, config: Config) -> dict[str, Any]:
    """A group in figures: seconds per step of every job, predicted and at most allowed, and USD per hour."""
    pair = pair_of(group.rollout_nodes, group.train_nodes, config.clusters)
    return {
        "nodes": {"rollout": list(group.rollout_nodes), "train": list(group.train_nodes)},
        "order": group.order,
        "usd_per_hour": group.usd_per_hour(config.clusters[pair]),
        "source": source(group, state, config),
        "periods": predict(group, state),
        "limits": {job.name: job.limit_s for job in group.jobs},
    }
