"""The keys under `mux.rollout`.

    mux.rollout:
      oversample: {rate, leftover, tokens, max_cuts, max_failures, accept_length_bias}
      max_lag, max_lag_strategy
      segments:   {segment_length, max_segments, max_length, treatment, truncated_reward}
      dispatch:   {order, predictor}
      speculative: none | ngram
      migration:  {enable, threshold, min_gain_s, max_slowdown}
      growth:     {own, min_gain_s}
      tail:       none | defer
      defer:      {window, max_mean}
      trigger:    {enable, n_min, t_max_s, entropy: {enable, high, low, margin, n_min_bounds, t_max_s_bounds}}

Every part is off, or harmless, by default. rollout_checks.py says which values go together.
"""

from __future__ import annotations

import msgspec

from verl_mux.rollout.control.growth_plan import GrowthPolicy
from verl_mux.rollout.control.lag_limit import LagLimit
from verl_mux.rollout.control.migration_plan import MigrationPolicy
from verl_mux.rollout.control.oversampling import OversamplingPolicy
from verl_mux.rollout.control.segments import SegmentLimits
from verl_mux.rollout.control.tail_rounds import DeferPolicy
from verl_mux.rollout.control.trigger import TriggerPolicy

SPECULATIVE = ("none", "ngram")


class SegmentsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In tokens. segment_length None: off. max_length None: data.max_response_length. truncated_reward None: its score."""

    segment_length: int | None = None
    max_segments: int = 4
    max_length: int | None = None
    treatment: str = "tis"
    truncated_reward: float | None = None


class DispatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """order `auto`: by trainer mode."""

    order: str = "fifo"
    predictor: str = "default"


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of `mux.rollout`. max_lag: versions; None: what verl's trainer.v1.sampler.max_off_policy_threshold leaves."""

    oversample: OversamplingPolicy = OversamplingPolicy()
    max_lag: int | None = None
    max_lag_strategy: str = "protect"
    segments: SegmentsConfig = SegmentsConfig()
    dispatch: DispatchConfig = DispatchConfig()
    migration: MigrationPolicy = MigrationPolicy()
    growth: GrowthPolicy = GrowthPolicy()
    tail: str = "none"
    defer: DeferPolicy = DeferPolicy()
    speculative: str = "none"
    trigger: TriggerPolicy = TriggerPolicy()

    @property
    def cuts(self) -> bool:
        """Are responses cut off before their end?"""
        return self.oversample.rate > 0 or self.segments.segment_length is not None

    @property
    def defers(self) -> bool:
        """Are prompts with long responses gathered into rounds of their own?"""
        return self.tail == "defer"

    @property
    def controlled(self) -> bool:
        """Does the trainer launch samples one by one, rather than verl? An order too needs that: priorities go with launches."""
        return self.cuts or self.migration.enable or self.growth.own is not None or self.dispatch.order != "fifo"

    @property
    def keeps_tokens(self) -> bool:
        """May a response go on under newer weights than those it began with?"""
        resumes = self.oversample.leftover == "requeue" and self.oversample.tokens == "resume"
        return self.segments.segment_length is not None or (self.oversample.rate > 0 and resumes)

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Does the treatment of older tokens read the log-probs they were generated with?"""
        return self.keeps_tokens and self.segments.treatment != "pois"

    def lag_limit(self, max_off_policy_threshold: int | None) -> LagLimit | None:
        """How old tokens may be; None without a limit. verl's threshold counts the versions that a trajectory spans."""
        most = self.max_lag
        if most is None and max_off_policy_threshold is not None:
            most = max_off_policy_threshold - 1
        return None if most is None or not self.keeps_tokens else LagLimit(most, self.max_lag_strategy)

    def segment_limits(self, max_response_length: int) -> SegmentLimits | None:
        """For SegmentPools; None where segments are off."""
        if self.segments.segment_length is None:
            return None
        longest = self.segments.max_length or max_response_length
        return SegmentLimits(self.segments.segment_length, self.segments.max_segments, longest)

    @property
    def launch_order(self) -> str:
        """fifo or sjf."""
        return self.dispatch.order if self.dispatch.order != "auto" else "sjf" if self.cuts else "fifo"
