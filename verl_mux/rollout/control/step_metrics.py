"""Counts of one step under rollout control."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepMetrics:
    """Groups and tokens of one step. A token is wasted when it is thrown away, in whichever step it was generated.

    kept: tokens of each response in the batch. cut: tokens so far of each response cut off. rounds: of segment rollout.
    reprefilled_tokens: kept tokens that the engine had to read again, their KV cache gone with the old weights.
    """

    launched_groups: int = 0
    trained_groups: int = 0
    requeued_groups: int = 0
    dropped_groups: int = 0
    failed_samples: int = 0
    generated_tokens: int = 0
    wasted_tokens: int = 0
    reprefilled_tokens: int = 0
    rounds: int = 1
    kept: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    @property
    def aborted_ratio(self) -> float:
        """Share of the launched groups that is not in the batch."""
        return (self.launched_groups - self.trained_groups) / max(1, self.launched_groups)

    @property
    def wasted_token_fraction(self) -> float:
        """Wasted tokens for each one generated."""
        return self.wasted_tokens / max(1, self.generated_tokens)

    @property
    def length_bias(self) -> float:
        """Mean length kept over mean length cut off; 1 when nothing was.

        What was cut off would have become longer still, so a value below 1 says for certain that the batch leans short.
        """
        return _mean(self.kept) / _mean(self.cut) if self.kept and sum(self.cut) else 1.0

    def as_dict(self) -> dict[str, float]:
        """Figures for the logger."""
        return {
            "launched_groups": self.launched_groups,
            "trained_groups": self.trained_groups,
            "requeued_groups": self.requeued_groups,
            "dropped_groups": self.dropped_groups,
            "failed_samples": self.failed_samples,
            "generated_tokens": self.generated_tokens,
            "wasted_tokens": self.wasted_tokens,
            "reprefilled_tokens": self.reprefilled_tokens,
            "rounds": self.rounds,
            "aborted_ratio": self.aborted_ratio,
            "wasted_token_fraction": self.wasted_token_fraction,
            "kept_mean_length": _mean(self.kept),
            "cut_mean_length": _mean(self.cut),
            "length_bias": self.length_bias,
        }


def _mean(values: list[int]) -> float:
    return sum(values) / max(1, len(values))
