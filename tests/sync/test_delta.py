"""Changes of a piece, wherever it lies in the region, make of its old bytes exactly the new ones; or they are refused."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from verl_mux.sync.delta import apply, changes, stamp
from verl_mux.sync.layout import Entry, Manifest


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@given(
    old=st.binary(max_size=3000),
    places=st.lists(st.integers(0, 2999), max_size=40),
    cuts=st.lists(st.integers(0, 2999), max_size=4),
)
def test_changes_make_the_new_bytes_wherever_the_spans_lie(old, places, cuts):
    new = bytearray(old)
    for place in places:
        if place < len(new):
            new[place] ^= 1 + place % 255
    found = changes(array(old), array(bytes(new)))
    if found is None:
        return
    assert 2 * len(found) <= len(old)
    ends = sorted({min(cut, len(old)) for cut in cuts} | {len(old)})
    spans, region = [], bytearray(b"\xee" * 7)
    for start, end in zip([0, *ends], ends, strict=False):
        spans.append((len(region), end - start))
        region += old[start:end] + b"\xee" * 5
    before = bytes(region)
    apply(found, spans, memoryview(region))
    assert b"".join(region[offset : offset + nbytes] for offset, nbytes in spans) == new
    for offset, nbytes in reversed(spans):
        del region[offset : offset + nbytes]
        before = before[:offset] + before[offset + nbytes :]
    assert region == before, "nothing beside the spans is touched"


def test_an_unchanged_piece_is_nothing_and_one_byte_far_on_is_little():
    old = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    assert changes(old, old.copy()) == b""
    new = old.copy()
    new[-1] ^= 1
    assert len(changes(old, new)) == 2 * -(-(1 << 20) // 255)


@pytest.mark.parametrize(("share", "pays"), [(0.02, True), (0.2, True), (0.3, False), (1.0, False)])
def test_what_changed_widely_goes_whole(share, pays):
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, 100_003, np.uint8)
    new = np.where(rng.random(len(old)) < share, old + 1, old).astype(np.uint8)
    assert (changes(old, new) is not None) == pays


@pytest.mark.parametrize("body", [b"\x01", b"\x05\x07", b"\x00\x07", b"\xff" * 40])
def test_changes_that_reach_beyond_the_piece_touch_nothing(body):
    region = bytearray(20)
    with pytest.raises(ValueError, match="reach beyond"):
        apply(body, [(4, 2), (10, 2)], memoryview(region))
    assert region == bytes(20)


def test_a_stamp_tells_other_bytes_other_places_and_other_ranks_apart():
    entries = [Entry("t", "uint8", (4,), 4)]
    found = {
        stamp(Manifest(source, entries, spans, piece), digests)
        for source in (0, 1) for spans in ([(0, 4)], [(0, 3)]) for piece in (2, 4) for digests in ([1, 2], [2, 1])
    }  # fmt: skip
    assert len(found) == 16
    assert stamp(Manifest(0, entries, [(0, 4)], 2), [1, 2]) in found
