"""Masks and old log-probs of the treatments against a reference written token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exploring import examples
from verl_mux.rollout.control.segment_loss import TREATMENTS, off_policy_share, segment_map, treat
from verl_mux.rollout.messages import Segment

CURRENT = 3


def reference(treatment, segments, width, mask, current, behaviour):
    """(loss mask, old log-prob) of each token, one at a time."""
    versions = [version for length, version in segments for _ in range(length)]
    last_start = len(versions)
    while last_start and versions[last_start - 1] == versions[-1]:
        last_start -= 1
    out = []
    for at in range(width):
        inside = at < len(versions)
        bears_loss = mask[at] == 1 and (treatment != "mask" or (inside and at >= last_start))
        stale = inside and versions[at] != CURRENT
        old = behaviour[at] if stale and treatment in ("mask", "sais") else current[at]
        out.append((float(bears_loss), old))
    return out


SEGMENTS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=4).map(
    lambda parts: [Segment(length, version) for length, version in sorted(parts, key=lambda part: part[1])]
)


@settings(max_examples=examples(150))
@given(st.sampled_from(TREATMENTS), st.lists(SEGMENTS, min_size=1, max_size=4), st.integers(0, 3), st.randoms())
def test_agrees_with_the_token_by_token_reference(treatment, batch, padding, random):
    width = max(sum(segment.length for segment in segments) for segments in batch) + padding
    shape = (len(batch), width)
    current, behaviour = (np.array([[random.gauss(-1, 1) for _ in range(width)] for _ in batch]) for _ in "ab")
    current, behaviour = current.reshape(shape), behaviour.reshape(shape)
    lengths = [sum(segment.length for segment in segments) for segments in batch]
    mask = np.array([[float(at < n and random.random() < 0.8) for at in range(width)] for n in lengths]).reshape(shape)

    loss = treat(treatment, segment_map(batch, width), CURRENT, mask, current, behaviour)

    for row, segments in enumerate(batch):
        want = reference(treatment, segments, width, mask[row], current[row], behaviour[row])
        got = zip(loss.loss_mask[row], loss.old_log_probs[row], strict=True)
        assert [tuple(token) for token in got] == want


@settings(max_examples=examples(100))
@given(st.lists(SEGMENTS, min_size=1, max_size=4))
def test_pois_equals_sais_exactly_where_the_weights_did_not_change(batch):
    width = 20
    segments = segment_map(batch, width)
    current = np.full((len(batch), width), -1.0)
    behaviour = current - 0.5
    mask = (segments.number >= 0).astype(float)
    pois, sais = (treat(name, segments, CURRENT, mask, current, behaviour) for name in ("pois", "sais"))
    assert np.array_equal(pois.loss_mask, sais.loss_mask)
    same = pois.old_log_probs == sais.old_log_probs
    assert np.array_equal(same, (segments.version == CURRENT) | (segments.version < 0))


def test_pois_has_ratio_one_everywhere_and_keeps_the_gradient():
    segments = segment_map([[Segment(2, 1), Segment(2, 3)]], 5)
    current = np.array([[-1.0, -2.0, -3.0, -4.0, 0.0]])
    mask = np.array([[1.0, 1, 1, 1, 0]])
    loss = treat("pois", segments, CURRENT, mask, current, current - 1)
    assert np.exp(current - loss.old_log_probs).tolist() == [[1.0] * 5]
    assert loss.loss_mask.tolist() == mask.tolist()


def test_mask_leaves_only_the_last_segment_and_sais_keeps_each_segments_own_policy():
    segments = segment_map([[Segment(2, 1), Segment(2, 3)]], 5)
    current, behaviour = np.full((1, 5), -1.0), np.full((1, 5), -2.0)
    mask = np.array([[1.0, 1, 1, 1, 0]])
    assert treat("mask", segments, CURRENT, mask, current, behaviour).loss_mask.tolist() == [[0, 0, 1, 1, 0]]
    assert treat("sais", segments, CURRENT, mask, current, behaviour).old_log_probs.tolist() == [[-2, -2, -1, -1, -1]]


def test_a_boundary_without_a_change_of_weights_is_none():
    assert segment_map([[Segment(2, 3), Segment(1, 3)]], 3).number.tolist() == [[0, 0, 0]]


def test_torch_tensors_give_the_same_as_arrays():
    torch = pytest.importorskip("torch")
    segments = segment_map([[Segment(2, 1), Segment(3, 3)], [Segment(1, 2)]], 6)
    random = np.random.default_rng(0)
    current, behaviour = random.normal(size=(2, 6)), random.normal(size=(2, 6))
    mask = (segments.number >= 0).astype(float)
    on_torch = type(segments)(*map(torch.from_numpy, segments))
    for treatment in TREATMENTS:
        want = treat(treatment, segments, CURRENT, mask, current, behaviour)
        got = treat(treatment, on_torch, CURRENT, *map(torch.from_numpy, (mask, current, behaviour)))
        for a, b in zip(want, got, strict=True):
            assert np.array_equal(a, b.numpy())


def test_says_how_much_older_weights_wrote():
    segments = segment_map([[Segment(3, 1), Segment(1, 3)]], 6)
    assert math.isclose(off_policy_share(segments, CURRENT, np.array([[1, 1, 0, 1, 0, 0]])), 2 / 3)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="mask, pois, sais"):
        treat("tois", segment_map([], 0), 0, None, None, None)
    with pytest.raises(ValueError, match="4 tokens"):
        segment_map([[Segment(4, 0)]], 3)
