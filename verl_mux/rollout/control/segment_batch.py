"""Applies a segment treatment to verl's batch: old log-probs and masks of tokens that older weights wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from verl_mux.rollout.control.segment_loss import WEIGHTED, SegmentMap, mean_lag, off_policy_share, segment_map, treat
from verl_mux.rollout.messages import Segment


class Treated(NamedTuple):
    """What to write back, nested (trajectories, response tokens); empty where nothing changes. metrics: for the logger."""

    fields: dict[str, torch.Tensor]
    metrics: dict[str, float]


def treat_batch(
    treatment: str, segments: Sequence[Sequence[Segment]], version: int, response_mask: torch.Tensor,
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor | None,
) -> Treated:  # fmt: skip
    """Loss mask and old log-probs of a batch.

    segments: of each trajectory, the oldest first, over the tokens that the model wrote. version: of the weights about to be
    updated. response_mask, old_log_probs, rollout_log_probs: nested, (trajectories, response tokens); rollout_log_probs is
    needed by mask and sais where there are tokens of older versions.
    """
    mask = response_mask.to_padded_tensor(padding=0)
    where = _over_response(segments, mask)
    metrics = {
        "off_policy_token_fraction": off_policy_share(where, version, mask),
        "mean_version_lag": mean_lag(where, version, mask),
        "segments_per_response": float((where.last + 1).double().mean()),
        "oldest_version_lag": float(version - min((s.version for t in segments for s in t), default=version)),
    }
    if treatment == "pois" or treatment in WEIGHTED or metrics["off_policy_token_fraction"] == 0:
        return Treated({}, metrics)
    assert rollout_log_probs is not None, f"treatment {treatment} needs the log-probs of generation"
    current = old_log_probs.to_padded_tensor(padding=0.0)
    behaviour = rollout_log_probs.to_padded_tensor(padding=0.0).to(current.dtype)
    loss = treat(treatment, where, version, mask, current, behaviour)
    fields = {"old_log_probs": _nested(loss.old_log_probs, response_mask)}
    if treatment == "mask":
        fields["response_mask"] = fields["loss_mask"] = _nested(loss.loss_mask, response_mask)
        metrics["masked_token_fraction"] = 1.0 - float(loss.loss_mask.sum()) / max(1.0, float(mask.sum()))
    return Treated(fields, metrics)


def _over_response(segments: Sequence[Sequence[Segment]], mask: torch.Tensor) -> SegmentMap:
    """The segment map with the tokens that the model did not write (tool output) left out of it."""
    packed = segment_map([_fitting(s, int(row.sum())) for s, row in zip(segments, mask, strict=True)], mask.shape[1])
    at = (mask.cumsum(dim=1) - 1).clamp(min=0)
    written = mask > 0
    number, version = (torch.from_numpy(part).gather(1, at).where(written, torch.tensor(-1)) for part in packed[:2])
    return SegmentMap(number, version, torch.from_numpy(packed.last))


def _fitting(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """verl cuts a response at its longest; so are its segments. A padding trajectory has none: one of version -1."""
    out: list[Segment] = []
    for segment in segments:
        length = min(segment.length, tokens - sum(s.length for s in out))
        out += [Segment(length, segment.version)] if length > 0 else []
    return out


def _nested(padded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    rows = [row[:length] for row, length in zip(padded, like.offsets().diff().tolist(), strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
