"""How trajectories that span several versions of the weights enter the loss: `tis | decoupled | mask | pois | sais`.

With theta the weights about to be updated, and pi_v those that generated a token:

| treatment | loss on          | old log-prob of a token                                        |
| tis       | every segment    | that of theta; the loss of a token is weighted by pi_theta / pi_v, at most 2 |
| decoupled | every segment    | that of theta; the same weight, at most 5 |
| mask      | the last segment | as sais; earlier segments are context                          |
| pois      | every segment    | that of theta: ratio 1 at the first update                     |
| sais      | every segment    | that of pi_v; of theta where v is theta's version already      |

`tis` and `decoupled` are verl's own rollout correction with weights token by token (truncated importance sampling; the decoupled
objective of AReaL, arXiv 2505.24298): verl computes and applies the weights, nothing is changed here. `mask` is what
slime calls masking off-policy tokens in a partial rollout; `pois` and `sais` are UloRL's (arXiv 2507.19766).
So pois and sais agree exactly on tokens whose weights have not changed since. A segment is a run of tokens of one version:
a boundary where the weights stayed the same is none. Arrays may be numpy or torch, (trajectories, tokens), right-padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from verl_mux.rollout.messages import Segment, merged

# Treatments that are verl's: algorithm.rollout_correction.rollout_is=token with this threshold.
WEIGHTED = {"tis": 2.0, "decoupled": 5.0}
TREATMENTS = (*WEIGHTED, "mask", "pois", "sais")
PADDING = -1


class SegmentMap(NamedTuple):
    """Which segment a token belongs to. number, version: (trajectories, tokens) int64, PADDING beyond the response.

    last: (trajectories, 1) int64, the number of each trajectory's last segment.
    """

    number: Any
    version: Any
    last: Any


class SegmentLoss(NamedTuple):
    """loss_mask and old_log_probs, (trajectories, tokens), in the types of what was given."""

    loss_mask: Any
    old_log_probs: Any


def segment_map(trajectories: Sequence[Sequence[Segment]], num_tokens: int) -> SegmentMap:
    """Numpy map of trajectories given by their segments, the oldest first.

    Raises:
        ValueError: a response is longer than num_tokens.
    """
    number = np.full((len(trajectories), num_tokens), PADDING, dtype=np.int64)
    version = number.copy()
    for row, segments in enumerate(map(merged, trajectories)):
        lengths = [segment.length for segment in segments]
        if sum(lengths) > num_tokens:
            raise ValueError(f"trajectory {row} has {sum(lengths)} tokens, the batch is {num_tokens} wide")
        number[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        version[row, : sum(lengths)] = np.repeat([segment.version for segment in segments], lengths)
    return SegmentMap(number, version, number.max(axis=1, initial=PADDING, keepdims=True))


def treat(
    treatment: str, segments: SegmentMap, current_version: int, response_mask: Any, current: Any, behaviour: Any
) -> SegmentLoss:
    """Loss mask and old log-probs.

    response_mask: 1 where the model wrote the token (tool output and padding are 0). current: log-probs under the weights
    about to be updated, of `current_version`. behaviour: log-probs as generated. All of the segment map's shape and library.

    Raises:
        ValueError: an unknown treatment.
    """
    if treatment not in TREATMENTS:
        raise ValueError(f"unknown segment treatment {treatment!r}; allowed: {', '.join(TREATMENTS)}")
    if treatment == "pois" or treatment in WEIGHTED:
        return SegmentLoss(response_mask, current)
    unchanged = (segments.version == current_version) | (segments.version == PADDING)
    old_log_probs = _where(unchanged, current, behaviour)
    if treatment == "sais":
        return SegmentLoss(response_mask, old_log_probs)
    in_last = segments.number == segments.last
    return SegmentLoss(_where(in_last, response_mask, response_mask * 0), old_log_probs)


def off_policy_share(segments: SegmentMap, current_version: int, response_mask: Any) -> float:
    """Share of the response tokens that older weights wrote."""
    stale = (segments.version != current_version) & (segments.version != PADDING) & (response_mask > 0)
    return float(stale.sum()) / max(1.0, float((response_mask > 0).sum()))


def mean_lag(segments: SegmentMap, current_version: int, response_mask: Any) -> float:
    """Versions between the weights that wrote a response token and the current ones, the mean over all of them."""
    written = (segments.version != PADDING) & (response_mask > 0)
    behind = (current_version - segments.version) * written
    return float(behind.sum()) / max(1.0, float((response_mask > 0).sum()))


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    import torch

    return torch.where(condition, yes, no)
