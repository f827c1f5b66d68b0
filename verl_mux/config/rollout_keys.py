"""The keys under `mux.rollout`.

    mux.rollout:
      oversample: {rate, max_cuts}
      max_lag, max_lag_strategy
      segments:   {segment_length, max_segments, max_length, treatment}
      dispatch:   {order, predictor}
      migration:  true | false
      growth:     {own}
      tail:       none | defer
      trigger:    {n_min, t_max_s, entropy}

Read in the trainer's driver and by verl_mux/what_if; pure. Every part is off, or harmless, by default. rollout_checks.py has
which values go together.
"""

from __future__ import annotations

import msgspec

from verl_mux.rollout.control.oversampling import MAX_CUTS, LagLimit
from verl_mux.rollout.control.segments import SegmentLimits


class OversampleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """rate: prompt groups launched beyond those wanted, as a share; 0: off. max_cuts: a group cut off this often runs to its
    end."""

    rate: float = 0.0
    max_cuts: int = MAX_CUTS


class SegmentsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In tokens. segment_length None: off. max_length None: data.max_response_length."""

    segment_length: int | None = None
    max_segments: int = 4
    max_length: int | None = None
    treatment: str = "tis"


class DispatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """order `auto`: sjf where responses are cut off, else fifo."""

    order: str = "fifo"
    predictor: str = "default"


class GrowthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """own: those of the job's rollout nodes that every rollout of it waits for; it uses the others while no other job wants them.
    None: off, all are its own."""

    own: list[str] | None = None


class TriggerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """n_min: prompt groups that are enough to train on; None: off. t_max_s: seconds after which one group is enough. entropy:
    nats below which both double and above which both halve; None: neither."""

    n_min: int | None = None
    t_max_s: float = 60.0
    entropy: tuple[float, float] | None = None


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of `mux.rollout`. max_lag: versions; None: what verl's trainer.v1.sampler.max_off_policy_threshold leaves."""

    oversample: OversampleConfig = OversampleConfig()
    max_lag: int | None = None
    max_lag_strategy: str = "protect"
    segments: SegmentsConfig = SegmentsConfig()
    dispatch: DispatchConfig = DispatchConfig()
    migration: bool = False
    growth: GrowthConfig = GrowthConfig()
    tail: str = "none"
    trigger: TriggerConfig = TriggerConfig()

    @property
    def cuts(self) -> bool:
        """Are responses cut off before their end, and go on under newer weights than those they began with?"""
        return self.oversample.rate > 0 or self.segments.segment_length is not None

    @property
    def defers(self) -> bool:
        """Are prompts with long responses gathered into rounds of their own?"""
        return self.tail == "defer"

    @property
    def controlled(self) -> bool:
        """Does the trainer launch samples one by one, rather than verl? An order too needs that: priorities go with launches."""
        return self.cuts or self.migration or self.growth.own is not None or self.dispatch.order != "fifo"

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Does the treatment of older tokens read the log-probs they were generated with?"""
        return self.cuts and self.segments.treatment != "pois"

    @property
    def launch_order(self) -> str:
        """fifo or sjf."""
        return self.dispatch.order if self.dispatch.order != "auto" else "sjf" if self.cuts else "fifo"

    def lag_limit(self, max_off_policy_threshold: int | None) -> LagLimit | None:
        """How old tokens may be; None without a limit. verl's threshold counts the versions that a trajectory spans."""
        most = self.max_lag
        if most is None and max_off_policy_threshold is not None:
            most = max_off_policy_threshold - 1
        return None if most is None or not self.cuts else LagLimit(most, self.max_lag_strategy)

    def segment_limits(self, max_response_length: int) -> SegmentLimits | None:
        """For SegmentSteps; None where segments are off."""
        if self.segments.segment_length is None:
            return None
        longest = self.segments.max_length or max_response_length
        return SegmentLimits(self.segments.segment_length, self.segments.max_segments, longest)
