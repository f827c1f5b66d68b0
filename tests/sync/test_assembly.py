"""Pieces in any order, each once, make the model; a tensor with a hole is never ready, and the last one not before all are
there."""

import random

import pytest

from verl_mux.sync.assembly import Assembly
from verl_mux.sync.failure import SyncError
from verl_mux.sync.layout import Entry, Layout, Manifest


def assembly_of(ranks: int, sizes: list[int], piece_bytes: int = 64) -> Assembly:
    """Every rank has an even part of each tensor."""
    entries = [Entry(f"t{at}", "uint8", (size,), size) for at, size in enumerate(sizes)]
    offsets = Layout(entries).offsets
    found = Assembly(range(ranks))
    for rank in range(ranks):
        cuts = [(at + size * rank // ranks, at + size * (rank + 1) // ranks) for at, size in zip(offsets, sizes, strict=True)]
        found.manifest(Manifest(rank, entries, [(a, b - a) for a, b in cuts if b > a], piece_bytes))
    return found


@pytest.mark.parametrize("seed", range(10))
def test_tensors_are_ready_in_order_and_only_when_whole(seed):
    draw = random.Random(seed)
    sizes = [draw.randrange(400) for _ in range(8)]
    it = assembly_of(draw.randrange(1, 4), sizes)
    left = [(source, number) for source, pieces in it.pieces.items() for number in range(len(pieces))]
    draw.shuffle(left)
    arrived = set()
    ends = [start + size for start, size in zip(Layout(it.layout.entries).offsets, sizes, strict=True)]
    while left:
        assert not it.complete and it.ready < len(sizes)
        source, number = left.pop()
        arrived |= {byte for start, nbytes in it.spans(source, number) for byte in range(start, start + nbytes)}
        it.place(source, number)
        for end, size in zip(ends[: it.ready], sizes, strict=False):
            assert arrived >= set(range(end - size, end))
    assert it.complete and it.ready == len(sizes)


def test_a_model_of_nothing_is_complete_at_once():
    it = assembly_of(2, [0, 0])
    assert it.complete and it.ready == 2


def test_nothing_goes_anywhere_before_all_ranks_have_said_what_they_send():
    it = Assembly([0, 1])
    it.manifest(Manifest(0, [Entry("t", "uint8", (4,), 4)], [(0, 2)], 64))
    assert it.layout is None and it.waiting_for == [1] and not it.complete
    with pytest.raises(SyncError, match="trainer rank 0 has no piece 0"):
        it.spans(0, 0)


def test_what_comes_twice_or_from_nobody_is_an_error():
    it = assembly_of(1, [200])
    it.place(0, 1)
    for source, number, error in ((0, 1, "arrived twice"), (0, 4, "has no piece 4"), (3, 0, "rank 3 has no piece")):
        with pytest.raises(SyncError, match=error):
            it.place(source, number)
    for source in (0, 5):
        with pytest.raises(SyncError, match=f"trainer rank {source} says what it sends, and nobody waits"):
            it.manifest(Manifest(source, [], [], 64))
