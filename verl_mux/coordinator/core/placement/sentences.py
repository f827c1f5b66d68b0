"""Why each job is where it is, in a sentence, for people. Pure."""

from __future__ import annotations

from verl_mux.coordinator.core.records import Job, JobState, State
from verl_mux.coordinator.core.settings import Config
from verl_mux.placement.explain import where


def told(state: State, config: Config) -> dict[str, str]:
    """Of all jobs that run or wait to be placed, by name."""
    on: dict[str, dict[str, None]] = {}
    jobs = [job for job in state.jobs.values() if job.state in (JobState.LIVE, JobState.SILENT) and not job.filler]
    for job in jobs:
        for node in job.all_nodes:
            on.setdefault(node, {})[job.name] = None
    found = {job.name: _sentence(job, on, state, config) for job in jobs}
    return {name: sentence for name, sentence in found.items() if sentence}


def _sentence(job: Job, on: dict[str, dict[str, None]], state: State, config: Config) -> str:
    if job.watched is None:
        return _named(job, on, config) if job.nodes else ""
    if not job.nodes:
        return f"{job.name} waits to be placed{_colon(job.watched.because)}"
    reason = job.watched.because
    return f"{_where(job, on)}{f', {reason}' if reason else ''}"


def _where(job: Job, on: dict[str, dict[str, None]]) -> str:
    return where(job.name, job.all_nodes, {node: [name for name in on[node] if name != job.name] for node in job.all_nodes})


def _named(job: Job, on: dict[str, dict[str, None]], config: Config) -> str:
    said = f"{_where(job, on)}, as it names {'these nodes' if len(job.all_nodes) > 1 else 'this node'}"
    prices = [config.price(node) for node in job.all_nodes]
    cost = sum(price for price in prices if price is not None)
    said += f", which cost {cost:.2f} USD/h" if None not in prices else ""
    return f"{said}; to be put where it adds the least, let the coordinator choose (mux.nodes=auto)" if config.placement else said


def _colon(reason: str) -> str:
    return f": {reason}" if reason else ""
