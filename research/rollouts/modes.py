"""Recorded lengths through every way to run a step's rollout: seconds, lengths, lag, waste."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from research.rollouts.alone import rollout_seconds
from research.rollouts.bed import Bed
from research.rollouts.deferred import Deferred, Known
from research.rollouts.job import Arrival, Machine, Source, VirtualJob
from research.rollouts.pool import Pool
from research.rollouts.recorded import Recording, recording
from verl_mux.rollout.control.lag_limit import LagLimit
from verl_mux.rollout.control.length_estimates import LengthEstimates
from verl_mux.rollout.control.oversampling import Oversampler, OversamplingPolicy
from verl_mux.rollout.control.segment_steps import SegmentSteps
from verl_mux.rollout.control.segments import SegmentLimits
from verl_mux.rollout.control.tail_rounds import DeferPolicy
from verl_mux.rollout.lengths.predictor import make_predictor
from verl_mux.rollout.lengths.rows import LengthRow

BASE, SHARED = "sync", "defer_shared"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is replayed besides the lengths. rate: of over-sampling. window: of `defer`, in steps; None: an epoch."""

    bed: Bed
    rate: float = 1.0
    window: int | None = None
    max_mean: float = 2.0
    predictor: str = "default"
    orders: int = 3  # of arrival; figures are of all of them together


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one mode. Lag is in versions of the weights and counted token by token. largest_step_mean: of a step's responses, over
    its epoch's mean; steps_above: with such a mean beyond `max_mean`, in all epochs and after the first."""

    seconds: float
    length_ratio: float
    lag_mean: float
    lag_max: int
    stale_token_fraction: float
    wasted_token_fraction: float
    prompts_lost: int
    largest_step_mean: float
    steps: int
    steps_above: int
    steps_above_later: int

    def as_dict(self, base: float) -> dict[str, float]:
        """For JSON. base: seconds of `sync`."""
        return {
            "time_ratio_to_sync": self.seconds / base if base else 1.0,
            "length_ratio": self.length_ratio,
            "lag_mean": self.lag_mean,
            "lag_max": self.lag_max,
            "stale_token_fraction": self.stale_token_fraction,
            "wasted_token_fraction": self.wasted_token_fraction,
            "prompts_lost": self.prompts_lost,
            "largest_step_mean_ratio": self.largest_step_mean,
            "steps": self.steps,
            "steps_above_bound": self.steps_above,
            "steps_above_bound_after_first_epoch": self.steps_above_later,
        }


def _plain(recorded: Recording, setting: Setting) -> VirtualJob:
    return _job(recorded, setting, Oversampler(OversamplingPolicy(), recorded.samples))


def _oversample(recorded: Recording, setting: Setting) -> VirtualJob:
    return _job(recorded, setting, Oversampler(OversamplingPolicy(rate=setting.rate, max_cuts=8), recorded.samples))


def _limited(most: int) -> Callable[[Recording, Setting], VirtualJob]:
    """Over-sampling with a limit of lag."""

    def make(recorded: Recording, setting: Setting) -> VirtualJob:
        policy = OversamplingPolicy(rate=setting.rate, max_cuts=99)
        return _job(recorded, setting, Oversampler(policy, recorded.samples, LagLimit(most)))

    return make


def _limited_segments(most: int) -> Callable[[Recording, Setting], VirtualJob]:
    """Segments with a limit of lag."""

    def make(recorded: Recording, setting: Setting) -> VirtualJob:
        return _job(recorded, setting, SegmentSteps(_segment_limits(recorded), recorded.samples, lag=LagLimit(most)))

    return make


def _restart(recorded: Recording, setting: Setting) -> VirtualJob:
    machine = Oversampler(OversamplingPolicy(rate=setting.rate, tokens="restart"), recorded.samples)
    return _job(recorded, setting, machine, restarts=True)


def _segments(recorded: Recording, setting: Setting) -> VirtualJob:
    return _job(recorded, setting, SegmentSteps(_segment_limits(recorded), recorded.samples))


def _segment_limits(recorded: Recording) -> SegmentLimits:
    longest = max(1, longest_of(recorded))
    return SegmentLimits(-(-longest // 4), 4, longest)


def _defer(recorded: Recording, setting: Setting) -> VirtualJob:
    estimates = LengthEstimates(make_predictor(setting.predictor), recorded.samples)
    return _job(recorded, setting, Oversampler(OversamplingPolicy(), recorded.samples), _rounds(recorded, setting, estimates))


def _defer_oracle(recorded: Recording, setting: Setting) -> VirtualJob:
    source = _rounds(recorded, setting, Known(recorded))
    return _job(recorded, setting, Oversampler(OversamplingPolicy(), recorded.samples), source)


MODES: dict[str, Callable[[Recording, Setting], VirtualJob]] = {
    BASE: _plain,
    "oversample": _oversample,
    "oversample_restart": _restart,
    "segments": _segments,
    "defer": _defer,
    "defer_oracle": _defer_oracle,
}
DEFAULT_MODES = (*MODES, SHARED)
LAGS = (0, 1, 2, 4, 8)
MODES |= {f"oversample_lag{most}": _limited(most) for most in LAGS}
MODES |= {f"segments_lag{most}": _limited_segments(most) for most in LAGS}
ALL_MODES = (*MODES, SHARED)


def measure(files: Sequence[Sequence[LengthRow]], modes: Sequence[str], setting: Setting) -> dict[str, Figures]:
    """{mode: figures}, `sync` always among them; `defer_shared` only with two recordings or more.

    files: the rows of each job. Every mode but defer_shared replays each job alone; times are added up.
    """
    by_order = [[recording(rows, seed) for rows in files] for seed in range(setting.orders)]
    recorded = [one for its in by_order for one in its]
    out = {BASE: _alone(MODES[BASE], recorded, setting)}
    for mode in modes:
        if mode in MODES and mode != BASE:
            out[mode] = _alone(MODES[mode], recorded, setting)
    if SHARED in modes and len(files) > 1:
        out[SHARED] = _together(by_order, setting, out[BASE].seconds)
    return out


def longest_of(recorded: Recording) -> int:
    """Tokens of the longest response."""
    return max(max(group.lengths) for group in recorded.groups)


def _job(
    recorded: Recording, setting: Setting, machine: Machine, source: Source | None = None, *, restarts: bool = False
) -> VirtualJob:  # fmt: skip
    return VirtualJob("a", machine, source or Arrival(recorded), recorded, setting.bed.batch, restarts=restarts)


def _rounds(recorded: Recording, setting: Setting, estimates: LengthEstimates | Known) -> Deferred:
    return Deferred(recorded, DeferPolicy(window=setting.window, max_mean=setting.max_mean), setting.bed.batch, estimates)


def _alone(make: Callable[[Recording, Setting], VirtualJob], recorded: Sequence[Recording], setting: Setting) -> Figures:
    jobs = [make(one, setting) for one in recorded]
    seconds = sum(rollout_seconds(job, setting.bed) for job in jobs)
    return _figures(seconds, jobs, recorded, setting.max_mean)


def _together(by_order: Sequence[Sequence[Recording]], setting: Setting, base: float) -> Figures:
    """Makespans of all jobs on one pool, deferring and sharing, against the same jobs taking turns without either."""
    bed = replace(setting.bed, replicas=max(2, setting.bed.replicas))
    spans = turns = 0.0
    jobs: list[VirtualJob] = []
    recorded: list[Recording] = []
    for its in by_order:
        longest = max(map(longest_of, its))
        plain, deferring = ([_named(make(one, setting), number) for number, one in enumerate(its)] for make in (_plain, _defer))
        turns += Pool(plain, bed, longest, shared=False).run()
        spans += Pool(deferring, bed, longest, shared=True).run()
        jobs += deferring
        recorded += its
    # Told as the others are, as a share of `base`: what it is a share of is the makespan of taking turns.
    return _figures(spans / turns * base if turns else base, jobs, recorded, setting.max_mean)


def _named(job: VirtualJob, number: int) -> VirtualJob:
    job.name = str(number)
    return job


def _figures(seconds: float, jobs: Sequence[VirtualJob], recorded: Sequence[Recording], max_mean: float) -> Figures:
    mixes = [mix for job, one in zip(jobs, recorded, strict=True) for mix in _mixes(job, one)]
    above = [later for later, ratio in mixes if ratio > max_mean]
    totals = [job.totals for job in jobs]
    trained = sum(t.trained_tokens for t in totals)
    drawn = [length for one in recorded for group in one.groups for length in group.lengths if length]
    kept = trained / max(1, sum(t.trained_responses for t in totals))
    groups = sum(len(one.groups) for one in recorded)
    return Figures(
        seconds=seconds,
        length_ratio=kept / mean(drawn) if drawn else 1.0,
        lag_mean=sum(t.lag_tokens for t in totals) / max(1, trained),
        lag_max=max(t.lag_max for t in totals),
        stale_token_fraction=sum(t.stale_tokens for t in totals) / max(1, trained),
        wasted_token_fraction=sum(t.wasted for t in totals) / max(1, sum(t.generated for t in totals)),
        prompts_lost=groups - sum(len(set(t.trained_groups)) for t in totals),
        largest_step_mean=max((ratio for _, ratio in mixes), default=1.0),
        steps=len(mixes),
        steps_above=len(above),
        steps_above_later=sum(above),
    )


def _mixes(job: VirtualJob, recorded: Recording) -> list[tuple[bool, float]]:
    """Of each step: was it after the first epoch; its responses' mean length over that of its epoch."""
    epochs = {its[0].epoch: [length for group in its for length in group.lengths if length] for its in recorded.epochs}
    means = {epoch: mean(lengths) if lengths else 1.0 for epoch, lengths in epochs.items()}
    return [(epoch > min(epochs), step / means[epoch]) for epoch, step in job.totals.step_means]
