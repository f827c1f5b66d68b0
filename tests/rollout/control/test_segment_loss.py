"""Segment treatments on verl's nested batches, against a reference written token by token."""

from __future__ import annotations

import pytest
import torch

from verl_mux.rollout.control.segment_loss import treat_batch
from verl_mux.rollout.instructions import Segment

NOW = 5
# Three responses of 4, 3 and 6 tokens; the last has two tokens of tool output in the middle.
SEGMENTS = [[Segment(2, 4), Segment(2, NOW)], [Segment(3, NOW)], [Segment(1, 3), Segment(3, 4)]]
MASKS = [[1, 1, 1, 1], [1, 1, 1], [1, 1, 0, 0, 1, 1]]


def nested(rows, dtype=torch.float32):
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


MASK = nested(MASKS, torch.int64)
OLD = nested([[-1.0 - 0.1 * i for i in range(len(row))] for row in MASKS])
ROLLOUT = nested([[-2.0 - 0.1 * i for i in range(len(row))] for row in MASKS])


def reference(treatment):
    """(loss mask, old log-probs) by rows."""
    masks, olds = [], []
    for row, segments in enumerate(SEGMENTS):
        versions = iter([s.version for s in segments for _ in range(s.length)])
        last = segments[-1].version
        mask, old = [], []
        for at, written in enumerate(MASKS[row]):
            version = next(versions) if written else None
            stale = written and version != NOW
            old.append((ROLLOUT if stale and treatment == "mask" else OLD)[row][at].item())
            mask.append(int(written and not (treatment == "mask" and version != last)))
        masks.append(mask)
        olds.append(old)
    return masks, olds


@pytest.mark.parametrize("treatment", ["mask", "pois", "tis"])
def test_against_the_reference(treatment):
    treated = treat_batch(treatment, SEGMENTS, NOW, MASK, OLD, ROLLOUT)
    masks, olds = reference(treatment)
    got_mask = treated.fields.get("response_mask", MASK)
    got_old = treated.fields.get("old_log_probs", OLD)
    for row in range(3):
        assert got_mask[row].tolist() == masks[row]
        written = torch.tensor(MASKS[row], dtype=torch.bool)
        assert torch.allclose(got_old[row][written], torch.tensor(olds[row])[written])
    assert treated.metrics["off_policy_token_fraction"] == pytest.approx(6 / 11)
    assert treated.metrics["oldest_version_lag"] == 2
    assert treated.metrics["mean_version_lag"] == pytest.approx((2 * 1 + 1 * 2 + 3 * 1) / 11)


def test_unchanged_weights_change_nothing():
    same = [[Segment(sum(s.length for s in segments), NOW)] for segments in SEGMENTS]
    treated = treat_batch("mask", same, NOW, MASK, OLD, ROLLOUT)
    assert treated.fields == {}
    assert treated.metrics["off_policy_token_fraction"] == 0


def test_a_padding_trajectory_has_no_segments_and_no_loss():
    treated = treat_batch("mask", [[Segment(2, 4)], []], NOW, nested([[1, 1], [0]], torch.int64), nested([[-1.0, -1.0], [0.0]]),
                          nested([[-2.0, -2.0], [0.0]]))  # fmt: skip
    assert treated.fields["old_log_probs"][0].tolist() == [-2.0, -2.0]
