"""What a log tells of a job's rollouts, as far as it can be run again: prompt groups with their lengths, and what steps took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.measures.analysis import Analysis

MIN_STEPS = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One response. tokens: of its turns, summed. prompt: tokens. away_s: seconds outside engines (tools, reward, ...)."""

    tokens: int
    prompt: int
    away_s: float
    score: float | None


@dataclass(frozen=True, slots=True)
class Group:
    """The responses of one prompt, and the step that first launched it. prompt: of the data set, the same in all epochs; None
    where the log does not say."""

    name: str
    step: int
    samples: tuple[Sample, ...]
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step: its rollout (from the first launch to the last sample it waited for), the rest, and of that the waits
    for leases. tokens: of the responses trained. start: of its rollout, since the epoch."""

    step: int
    rollout_s: float
    rest_s: float
    leases_s: float
    tokens: int
    start: float = 0.0


@dataclass(frozen=True)
class Recording:
    """A job's rollouts. keys: as the log says them. slots: requests that a replica ran at once while others queued; None where
    none did. unknown: samples left out because how long they would be is not known."""

    job: str
    keys: dict[str, str]
    groups: tuple[Group, ...]
    steps: tuple[StepTimes, ...]
    replicas: int
    slots: int | None
    unknown: int

    @property
    def recurs(self) -> bool:
        """Do prompts come again, as in a second epoch?"""
        named = [group.prompt for group in self.groups if group.prompt is not None]
        return len(named) == len(self.groups) > len(set(named))

    @property
    def longest(self) -> int:
        return max(sample.tokens for group in self.groups for sample in group.samples)

    @property
    def wanted(self) -> int:
        """Prompt groups that a step trains."""
        told = self.keys.get("data.train_batch_size")
        return int(told) if told else max(1, round(len(self.groups) / len(self.steps)))


def recordings(analysis: Analysis) -> Iterator[Recording]:
    """One of each job whose log can be run again.

    Raises:
        UserError: no job of the log can; says why.
    """
    reasons = {}
    found = False
    for job in sorted(set(analysis.requests["job"])):
        try:
            recording = _recording(analysis, job)
        except _Lacking as lacking:
            reasons[job] = str(lacking)
            continue
        found = True
        yield recording
    if not found:
        why = "; ".join(f"{job or 'the log'}: {reason}" for job, reason in reasons.items()) or "it has no requests"
        raise UserError(f"this log cannot be run again ({why})")


class _Lacking(Exception):
    """What a log lacks."""


def _recording(analysis: Analysis, job: str) -> Recording:
    of_job = pl.col("job") == job
    requests = analysis.requests.filter(of_job & ~pl.col("validate"))
    done = requests.filter((pl.col("status") == "complete") & (pl.col("tokens") > 0))
    if done.is_empty():
        raise _Lacking("no finished request tells its tokens")
    prompts = analysis.stays.filter(of_job).group_by("request_id").agg(pl.col("prompt").min())
    first = analysis.stays.filter(of_job).group_by("request_id").agg(pl.col("step").min().alias("first"))
    done = done.join(prompts, on="request_id", how="left").join(first, on="request_id", how="left")
    steps = _steps(analysis, job, done)
    if len(steps) < MIN_STEPS:
        raise _Lacking(f"{len(steps)} steps with their times, {MIN_STEPS} are needed")
    groups = _groups(done)
    replicas = max(1, analysis.engines.stays.filter(of_job)["replica"].n_unique())
    keys = analysis.keys(job)
    _infer(keys, analysis, job, groups)
    return Recording(job, keys, groups, steps, replicas, _slots(analysis, job), requests.height - done.height)


def stays_of(analysis: Analysis, job: str) -> pl.DataFrame:
    """The job's stays in engines, of `measures.engines.Engines.stays`, without those of validation."""
    validated = analysis.requests.filter((pl.col("job") == job) & pl.col("validate")).select("request_id")
    stays = analysis.engines.stays.filter(pl.col("job") == job)
    return stays.join(validated, on="request_id", how="anti", maintain_order="left")


def _slots(analysis: Analysis, job: str) -> int | None:
    """Requests that ran at once, where a fifth of the counters or more saw some queued."""
    counters = analysis.engines.counters.filter(pl.col("job") == job)
    queued = counters.filter(pl.col("queued") > 0)
    return int(queued["running"].max()) if queued.height >= 0.2 * counters.height > 0 else None


def _groups(done: pl.DataFrame) -> tuple[Group, ...]:
    """In the order in which their first sample began. A name without a number is a group of its own."""
    named = done.with_columns(
        pl.col("request_id").str.replace(r"_\d+$", "").alias("group"),
        pl.coalesce("first", "step").alias("first"),
        (pl.col("seconds") - pl.col("engine")).clip(0.0).alias("away"),
    ).sort("start", "request_id")
    columns = ["tokens", "prompt", "away", "score"]
    rows = named.group_by("group", maintain_order=True).agg(pl.col("first", "prompt_id").min(), *columns)
    return tuple(
        Group(name, first, tuple(Sample(t, p or 0, a, s) for t, p, a, s in zip(*lists, strict=True)), prompt)
        for name, first, prompt, *lists in rows.sort("first", maintain_order=True).iter_rows()
    )


def _steps(analysis: Analysis, job: str, done: pl.DataFrame) -> tuple[StepTimes, ...]:
    trainer = analysis.spans.filter((pl.col("job") == job) & (pl.col("role") == "trainer"))
    whole = dict(trainer.filter(pl.col("event") == events.STEP).select("step", "seconds").iter_rows())
    validated = _seconds_by_step(trainer, events.VALIDATE)
    waited = trainer.filter((pl.col("event") == events.LEASE_WAIT) & (pl.col("phase") != "init"))
    leases = dict(waited.group_by("step").agg(pl.col("seconds").sum()).iter_rows())
    monitored = _seconds_by_step(trainer, events.GENERATE_MONITORED)
    spans = done.group_by("step").agg(pl.col("start").min(), pl.col("end").max(), pl.col("tokens").sum())
    found = []
    for step, start, end, tokens in spans.sort("step").iter_rows():
        if step not in whole:
            continue
        rollout = monitored.get(step, end - start)
        rest = whole[step] - rollout - leases.get(step, 0.0) - validated.get(step, 0.0)
        found.append(StepTimes(step, rollout, max(rest, 0.0), leases.get(step, 0.0), tokens, start))
    return tuple(found)


def _seconds_by_step(spans: pl.DataFrame, event: str) -> dict[int, float]:
    return dict(spans.filter(pl.col("event") == event).group_by("step").agg(pl.col("seconds").sum()).iter_rows())


def _infer(keys: dict[str, str], analysis: Analysis, job: str, groups: tuple[Group, ...]) -> None:
    """What an older log does not say, from what happened: sizes of batch and group, over-sampling, the longest response."""
    if keys:
        return
    counted = analysis.spans.filter((pl.col("job") == job) & (pl.col("event") == events.GENERATE_MONITORED))
    counted = counted.filter(pl.col("wanted").is_not_null() & (pl.col("launched") > 0))
    samples = max(len(group.samples) for group in groups)
    keys["actor_rollout_ref.rollout.n"] = str(samples)
    if counted.height:
        wanted = int(counted["wanted"].median())
        keys["data.train_batch_size"] = str(wanted)
        rate = float(counted["launched"].quantile(0.9)) / (wanted * samples) - 1
        keys["mux.rollout.oversample.rate"] = f"{max(rate, 0.0):.2g}"
