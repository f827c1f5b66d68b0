"""How trajectories that span several versions of the weights enter verl's loss: `mux.rollout.segments.treatment`.

Runs in the trainer's driver; called by trainer/step_rollout.py once verl has computed old log-probs. Pure, on torch tensors.

With theta the weights about to be updated, and pi_v those that generated a token:

| treatment | loss on          | old log-prob of a token                                                      |
| tis       | every segment    | that of theta; the loss of a token is weighted by pi_theta / pi_v, at most 2 |
| mask      | the last segment | that of pi_v; of theta where v is theta's version already                    |
| pois      | every segment    | that of theta: ratio 1 at the first update                                   |

`tis` is verl's own rollout correction with weights token by token (truncated importance sampling): verl computes and applies
the weights, nothing is changed here. `mask` is what slime calls masking off-policy tokens in a partial rollout; `pois` is UloRL's
(arXiv 2507.19766). A segment is a run of tokens of one version: a boundary where the weights stayed the same is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from verl_mux.rollout.instructions import Segment, merged

_NONE = -1  # segment and version of a token that the model did not write


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
    updated. response_mask (1 where the model wrote the token, 0 for tool output), old_log_probs, rollout_log_probs: nested,
    (trajectories, response tokens); rollout_log_probs is needed by `mask` where there are tokens of older versions.
    """
    mask = response_mask.to_padded_tensor(padding=0)
    number, versions = _segment_of_token(segments, mask)
    written, stale = versions != _NONE, (versions != version) & (versions != _NONE)
    tokens, last = max(1.0, float((mask > 0).sum())), number.amax(dim=1, keepdim=True)
    metrics = {
        "off_policy_token_fraction": float(stale.sum()) / tokens,
        "mean_version_lag": float(((version - versions) * written).sum()) / tokens,
        "segments_per_response": float((last + 1).double().mean()),
        "oldest_version_lag": float(version - min((s.version for t in segments for s in t), default=version)),
    }
    if treatment != "mask" or not stale.any():
        return Treated({}, metrics)
    assert rollout_log_probs is not None, "treatment mask needs the log-probs of generation"
    current = old_log_probs.to_padded_tensor(padding=0.0)
    behaviour = rollout_log_probs.to_padded_tensor(padding=0.0).to(current.dtype)
    loss_mask = torch.where(number == last, mask, torch.zeros_like(mask))
    metrics["masked_token_fraction"] = 1.0 - float(loss_mask.sum()) / max(1.0, float(mask.sum()))
    fields = {"old_log_probs": _nested(torch.where(stale, behaviour, current), response_mask)}
    fields["response_mask"] = fields["loss_mask"] = _nested(loss_mask, response_mask)
    return Treated(fields, metrics)


def _segment_of_token(segments: Sequence[Sequence[Segment]], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of each token's segment in its trajectory, and its version: (trajectories, tokens) int64 each, _NONE for padding and
    tool output. verl cuts a response at its longest; so are its segments here. A padding trajectory has none."""
    number = torch.full(mask.shape, _NONE, dtype=torch.int64)
    versions = number.clone()
    for row, its in enumerate(map(merged, segments)):
        lengths = torch.tensor([segment.length for segment in its], dtype=torch.int64)
        places = mask[row].nonzero().flatten()[: int(lengths.sum())]
        number[row, places] = torch.arange(len(its)).repeat_interleave(lengths)[: len(places)]
        of_segment = torch.tensor([segment.version for segment in its], dtype=torch.int64)
        versions[row, places] = of_segment.repeat_interleave(lengths)[: len(places)]
    return number, versions


def _nested(padded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    rows = [row[:length] for row, length in zip(padded, like.offsets().diff().tolist(), strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
