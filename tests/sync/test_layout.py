"""Every byte of the model has one place and one sender; pieces arrive in any order, each once; a tensor with a hole is never
ready."""

import os
import random

import msgspec
import pytest

from verl_mux.sync.layout import ALIGN, Assembly, Entry, Held, Layout, Manifest, SyncError, cut, joined


def entries(*sizes: int) -> list[Entry]:
    return [Entry(f"t{at}", "uint8", (size,), size) for at, size in enumerate(sizes)]


def test_tensors_lie_in_order_aligned_and_apart():
    layout = Layout(entries(10, 0, ALIGN, 1))
    assert layout.offsets == [0, ALIGN, ALIGN, 2 * ALIGN] and layout.nbytes == 3 * ALIGN
    assert [layout.entry_at(at) for at in (0, 9, ALIGN, 2 * ALIGN - 1, 2 * ALIGN)] == [0, 0, 2, 2, 3]


def test_a_tied_tensor_has_the_place_of_the_other():
    layout = Layout([*entries(10, 20), Entry("head", "uint8", (10,), 10, tied=0)])
    assert layout.offsets == [0, ALIGN, 0] and layout.spans == [(0, 10), (ALIGN, 20)]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_spans_cut_in_order(seed):
    draw = random.Random(seed)
    spans, at = [], 0
    for _ in range(draw.randrange(1200)):
        at += draw.randrange(50)
        spans.append((at, draw.randrange(1, 300)))
        at += spans[-1][1]
    pieces = cut(spans, 256)
    assert all(sum(nbytes for _, nbytes in piece) <= 256 and 0 < len(piece) <= 512 for piece in pieces)
    covered = [byte for piece in pieces for start, nbytes in piece for byte in range(start, start + nbytes)]
    assert covered == [byte for start, nbytes in spans for byte in range(start, start + nbytes)]


def manifests(sizes: list[int], *spans: list[tuple[int, int]]) -> dict[int, Manifest]:
    return {rank: Manifest.of(rank, entries(*sizes), its, 256) for rank, its in enumerate(spans)}


def test_senders_that_have_every_byte_between_them_are_joined():
    assert joined(manifests([10, 0, 20], [(0, 4), (ALIGN, 20)], [(4, 6)])).nbytes == 2 * ALIGN
    assert joined(manifests([10], [], [(0, 10)], [])).nbytes == ALIGN
    assert joined(manifests([], [])).nbytes == 0


@pytest.mark.parametrize(
    ("spans", "error"),
    [
        ([[(0, 10)], []], "t2: byte 0 of 20 has no sender"),
        ([[(0, 4), (ALIGN, 20)], [(5, 5)]], "t0: byte 4 of 10 has no sender"),
        ([[(0, 9), (ALIGN, 20)], []], "t0: byte 9 of 10 has no sender"),
        ([[(0, 10), (ALIGN, 20)], [(0, 10)]], "t0: byte 10 of 10 is sent twice"),
        ([[(0, 10), (ALIGN, 20)], [(4, 2)]], "t0: byte 10 of 10 is sent twice"),
        ([[(0, 11), (ALIGN, 20)], []], "t0: byte 11 of 10 is sent twice"),
        ([[(0, 10), (ALIGN, 20)], [(ALIGN + 20, 3)]], "belong to no tensor"),
    ],
)
def test_bytes_that_nobody_sends_or_two_do_are_named(spans, error):
    with pytest.raises(SyncError, match=error):
        joined(manifests([10, 0, 20], *spans))


def test_ranks_that_disagree_are_named_with_the_tensor():
    found = {0: Manifest.of(0, entries(10), [(0, 10)], 256), 1: Manifest.of(1, entries(12), [], 256)}
    with pytest.raises(SyncError, match=r"trainer ranks 0 and 1 disagree on the model: t0 uint8 \[10\] and t0 uint8 \[12\]"):
        joined(found)


def test_ranks_that_name_the_same_tensors_share_one_list_of_them():
    it, said = Assembly(range(2)), [msgspec.msgpack.encode(Manifest.of(rank, entries(3, 5), [], 4096)) for rank in range(2)]
    first, second = (msgspec.msgpack.decode(body, type=Manifest) for body in said)
    assert first.entries == entries(3, 5)
    with pytest.raises(SyncError, match="has no sender"):
        it.manifest(first) or it.manifest(second)
    assert it.manifests[1].raw is it.manifests[0].raw


def assembly_of(ranks: int, sizes: list[int], piece_bytes: int = 64) -> Assembly:
    """Every rank has an even part of each tensor."""
    entries = [Entry(f"t{at}", "uint8", (size,), size) for at, size in enumerate(sizes)]
    offsets = Layout(entries).offsets
    found = Assembly(range(ranks))
    for rank in range(ranks):
        cuts = [(at + size * rank // ranks, at + size * (rank + 1) // ranks) for at, size in zip(offsets, sizes, strict=True)]
        found.manifest(Manifest.of(rank, entries, [(a, b - a) for a, b in cuts if b > a], piece_bytes))
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
    it.manifest(Manifest.of(0, [Entry("t", "uint8", (4,), 4)], [(0, 2)], 64))
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
        with pytest.raises(SyncError, match=f"trainer rank {source} sent an unexpected manifest"):
            it.manifest(Manifest.of(source, [], [], 64))


def test_memory_of_another_process_is_not_received_into():
    """Its owner relies on what is in it."""
    owner, reader = Held(), Held()
    theirs = owner.of(100)
    theirs.view[:2] = b"ab"
    reader.mapped(os.dup(theirs.fd), 100)
    mine = reader.of(100)
    mine.view[:2] = b"cd"
    assert bytes(theirs.view[:2]) == b"ab" and reader.of(100) is mine
    for held in (owner, reader):
        held.close()
