"""A run as its log has it: responses in their order, the keys that steered them, and what is known of lengths beforehand.

Runs on the command line (`report --advise`, `--what-if`); called by rerun.py and what_if.py. Pure; reads the report's tables.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
import polars as pl

from verl_mux.config.rollout_checks import Surroundings, refused_rollout
from verl_mux.config.schema import DispatchConfig, RolloutConfig
from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.rollout.control.launch_order import ORDERS
from verl_mux.rollout.control.oversampling import STRATEGIES
from verl_mux.rollout.control.tail_rounds import MAX_MEAN, TAILS, LengthEstimates, TailRounds
from verl_mux.rollout.lengths.predictors import LengthPredictor, LengthRow, Prompt, make_predictor

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
        given = self.keys.get("data.train_batch_size")
        return int(given) if given else max(1, round(len(self.groups) / len(self.steps)))


def recordings(analysis: Analysis) -> Iterator[Recording]:
    """One of each job whose log can be run again.

    Raises:
        UserError: no job of the log can; says why.
    """
    reasons = {}
    jobs = sorted(set(analysis.requests["job"]))
    for job in jobs:
        recording = _recording(analysis, job)
        if isinstance(recording, Recording):
            yield recording
        else:
            reasons[job] = recording
    if len(reasons) == len(jobs):
        why = "; ".join(f"{job or 'the log'}: {reason}" for job, reason in reasons.items()) or "it has no requests"
        raise UserError(f"this log cannot be run again ({why})")


def _recording(analysis: Analysis, job: str) -> Recording | str:
    """A text: what the job's log lacks."""
    of_job = pl.col("job") == job
    requests = analysis.requests.filter(of_job & ~pl.col("validate"))
    done = requests.filter((pl.col("status") == "complete") & (pl.col("tokens") > 0))
    if done.is_empty():
        return "no finished request tells its tokens"
    by_request = analysis.stays.filter(of_job).group_by("request_id")
    done = done.join(by_request.agg(pl.col("prompt").min(), pl.col("step").min().alias("first")), on="request_id", how="left")
    steps = _steps(analysis, job, done)
    if len(steps) < MIN_STEPS:
        return f"{len(steps)} steps with their times, {MIN_STEPS} are needed"
    groups = _groups(done)
    replicas = max(1, analysis.engines.stays.filter(of_job)["replica"].n_unique())
    keys = analysis.keys(job)
    _infer(keys, analysis, job, groups)
    return Recording(job, keys, groups, steps, replicas, _slots(analysis, job), requests.height - done.height)


def stays_of(analysis: Analysis, job: str) -> pl.DataFrame:
    """The job's stays in engines."""
    return analysis.engines.stays.filter(pl.col("job") == job)


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


@dataclass(frozen=True)
class Settings:
    """wanted: prompt groups that a step trains. samples: of a group. longest: most tokens of a response. slots: requests that one
    replica runs at once. rollout: the keys under mux.rollout. mode: trainer mode; empty where the log names none. threshold:
    verl's max_off_policy_threshold, at_once: requests that all engines may run; None where the log does not say."""

    wanted: int
    samples: int
    longest: int
    slots: int
    rollout: RolloutConfig
    mode: str = ""
    threshold: int | None = None
    at_once: int | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the job would start under these; one whose log names no trainer mode is taken to have one of ours."""
        around = Surroundings(self.mode or "mux_separate", self.wanted, self.samples, self.longest, self.at_once)
        return not any(True for _ in refused_rollout(self.rollout, around))


SLOTS = "actor_rollout_ref.rollout.max_num_seqs"
_FIELDS = {"data.max_response_length": "longest", "data.train_batch_size": "wanted", SLOTS: "slots"}
_OFF = ("none", "null", "off")
# Prompt groups, and parts of a batch, beyond any job's: all groups of a step are drawn.
_MOST_GROUPS, _MOST_RATE = 16_384, 100.0
# Keys that can be tried -> what they may be.
KEYS = {
    "data.max_response_length": "tokens, from 1 to the longest recorded response",
    "data.train_batch_size": f"prompt groups, from 1 to {_MOST_GROUPS}",
    SLOTS: "requests, 1 or more",
    "mux.rollout.oversample.rate": f"from 0 to {_MOST_RATE:g}",
    "mux.rollout.oversample.max_cuts": "0 or more",
    "mux.rollout.segments.segment_length": "tokens, 1 or more, or null",
    "mux.rollout.segments.max_segments": "1 or more",
    "mux.rollout.max_lag": "versions, 0 or more, or null",
    "mux.rollout.max_lag_strategy": ", ".join(STRATEGIES),
    "mux.rollout.dispatch.order": ", ".join((*ORDERS, "auto")),
    "mux.rollout.tail": ", ".join(TAILS),
}


def recorded(recording: Recording) -> Settings:
    """The settings that the recording was made under, as far as its log says them."""
    keys = recording.keys
    samples = int(keys.get("actor_rollout_ref.rollout.n", max(len(group.samples) for group in recording.groups)))
    slots = int(keys.get(SLOTS, 1 << 30))
    threshold = keys.get("trainer.v1.sampler.max_off_policy_threshold")
    settings = Settings(
        recording.wanted, samples, recording.longest, min(slots, recording.slots or slots),
        RolloutConfig(dispatch=DispatchConfig(predictor=keys.get("mux.rollout.dispatch.predictor", "default"))),
        mode=keys.get("trainer.v1.trainer_mode", ""), threshold=int(threshold) if threshold else None,
        at_once=slots * recording.replicas if SLOTS in keys else None,
    )  # fmt: skip
    return changed(settings, {key: value for key, value in keys.items() if key in KEYS and key not in _FIELDS})


def changed(settings: Settings, keys: Mapping[str, str]) -> Settings:
    """`settings` under other keys.

    Raises:
        UserError: a key that cannot be tried on a recording, or a value that is not possible.
    """
    for key, text in keys.items():
        if key not in KEYS:
            raise UserError(f"--what-if {key}: cannot be tried on a recorded run; allowed: {', '.join(KEYS)}")
        try:
            settings = _with_field(settings, key, text) if key in _FIELDS else _with_rollout(settings, key, text)
        except msgspec.ValidationError:
            raise UserError(f"--what-if {key}={text} is not possible; allowed: {KEYS[key]}") from None
    return settings


def _with_field(settings: Settings, key: str, text: str) -> Settings:
    name = _FIELDS[key]
    most = {"longest": settings.longest, "wanted": _MOST_GROUPS}.get(name, sys.maxsize)
    return replace(settings, **{name: msgspec.convert(text, Annotated[int, msgspec.Meta(ge=1, le=most)], strict=False)})


def _with_rollout(settings: Settings, key: str, text: str) -> Settings:
    *parents, name = key.removeprefix("mux.rollout.").split(".")
    keys = msgspec.to_builtins(settings.rollout)
    part = keys[parents[0]] if parents else keys
    part[name] = None if name in ("segment_length", "max_lag") and text.lower() in _OFF else text
    rollout = msgspec.convert(keys, RolloutConfig, strict=False)
    if not rollout.oversample.rate <= _MOST_RATE:
        raise msgspec.ValidationError
    return replace(settings, rollout=rollout)


TAU = 0.5  # rank agreement of predicted and true lengths, as a learning predictor reaches on known data
# Those whose order is known without the prompts' texts.
BY_ID = ("default", "fifo", "history")


class Foresight:
    """prompt(of a drawn group) -> what a predictor of this kind may be asked about.

    learns: name of the predictor that the job learns with. None: this is the predictor itself: true lengths, with as much noise
    as leaves a rank agreement of tau (of a bivariate normal, tau = 2/pi asin r; Greiner 1909).
    """

    def __init__(self, learns: str | None, seed: int, tau: float = TAU) -> None:
        self._learns, self._tau, self._chance = learns, tau, random.Random(seed)
        self._true: dict[str, float] = {}  # mean tokens of a group by its name
        self._noise: dict[str, float] = {}  # asked twice, it says the same

    def predictor(self) -> LengthPredictor:
        """A fresh one."""
        return self if self._learns is None else make_predictor(self._learns)

    def prompt(self, name: str, group: Group) -> Prompt:
        """name: of this draw."""
        if self._learns is not None:
            return Prompt(group.prompt or name, "")
        self._true[name] = sum(sample.tokens for sample in group.samples) / len(group.samples)
        return Prompt(name, "")

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Nothing to learn."""

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Logarithms of tokens, (prompts,)."""
        true = np.log([max(self._true[prompt.id], 1.0) for prompt in prompts])
        r = math.sin(math.pi * self._tau / 2)
        noise = float(true.std()) * math.sqrt(1 / r**2 - 1) if r > 0 else 0.0
        return true + noise * np.array([self._noise.setdefault(prompt.id, self._chance.gauss(0, 1)) for prompt in prompts])


def in_order(recording: Recording, seed: int) -> Iterator[Group]:
    """As recorded, and when these are used up, drawn by chance."""
    return itertools.chain(recording.groups, resampled(recording, seed))


def resampled(recording: Recording, seed: int) -> Iterator[Group]:
    """Drawn by chance: what belongs together stays together. Where prompts recur that is all epochs of a prompt, under a name
    that nothing was learnt of yet, or its responses would be known before they are drawn; else a whole step."""
    chance = random.Random(seed)
    draw = _epochs if recording.recurs else _in_steps
    while True:
        yield from draw(recording.groups, chance)


def _in_steps(groups: Sequence[Group], chance: random.Random) -> list[Group]:
    by_step: dict[int, list[Group]] = {}
    for group in groups:
        by_step.setdefault(group.step, []).append(group)
    steps = list(by_step.values())
    return [group for step in chance.choices(steps, k=len(steps)) for group in step]


def _epochs(groups: Sequence[Group], chance: random.Random) -> list[Group]:
    by_prompt: dict[str | None, list[Group]] = {}
    for group in groups:
        by_prompt.setdefault(group.prompt, []).append(group)
    drawn = chance.choices(list(by_prompt.values()), k=len(by_prompt))
    again = chance.getrandbits(32)
    out: list[Group] = []
    for epoch in range(max(map(len, drawn))):
        named = [replace(its[epoch], prompt=f"{again}:{at}") for at, its in enumerate(drawn) if epoch < len(its)]
        out += chance.sample(named, len(named))
    return out


class Rounds:
    """`mux.rollout.tail: defer` over a stream that does not end. longest: prompt groups of a window; it ends sooner where a
    prompt comes again, which begins another epoch."""

    def __init__(
        self, stream: Iterator[Group], batch: int, samples: int, foresight: Foresight, longest: int, max_mean: float = MAX_MEAN
    ) -> None:  # fmt: skip
        self._stream, self._foresight, self._longest = named(stream), foresight, longest
        self._rounds = TailRounds(batch, LengthEstimates(foresight.predictor(), samples), max_mean)
        self._groups: dict[str, Group] = {}
        self._next = next(self._stream)
        self._epoch = 0

    def draw(self, count: int) -> list[tuple[str, Group]]:
        """The next round."""
        names = self._rounds.take(count)
        while len(names) < count:
            self._gather()
            names += self._rounds.take(count - len(names))
        return [(name, self._groups.pop(name)) for name in names]

    def trained(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """What these turned out to be is learnt."""
        self._rounds.trained(lengths, self._epoch)

    def _gather(self) -> None:
        seen: set[str] = set()
        window: dict[str, Prompt] = {}
        while len(window) < self._longest:
            name, group = self._next
            if group.prompt in seen:
                break
            seen |= {group.prompt} if group.prompt is not None else set()
            self._groups[name], window[name] = group, self._foresight.prompt(name, group)
            self._next = next(self._stream)
        self._epoch += 1
        self._rounds.gather(list(window), list(window.values()))


def named(stream: Iterator[Group]) -> Iterator[tuple[str, Group]]:
    """A name for each draw."""
    return ((f"{group.name}#{number}", group) for number, group in enumerate(stream))
