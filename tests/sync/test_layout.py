"""Every byte of the model has one place and one sender, and what does not is named."""

import random

import msgspec
import pytest

from verl_mux.sync.failure import SyncError
from verl_mux.sync.layout import ALIGN, Entry, Layout, Manifest, Manifests, cut, joined


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
    return {rank: Manifest(rank, entries(*sizes), its, 256) for rank, its in enumerate(spans)}


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
    found = {0: Manifest(0, entries(10), [(0, 10)], 256), 1: Manifest(1, entries(12), [], 256)}
    with pytest.raises(SyncError, match=r"trainer ranks 0 and 1 disagree on the model: t0 uint8 \[10\] and t0 uint8 \[12\]"):
        joined(found)


def test_ranks_that_name_the_same_tensors_share_one_list_of_them():
    reader, found = Manifests(), entries(3, 5)
    first, second = (reader.read(msgspec.msgpack.encode(Manifest(rank, found, [(0, 3)], 4096))) for rank in range(2))
    assert first == Manifest(0, found, [(0, 3)], 4096) and second.source == 1
    assert second.entries is first.entries
    assert reader.read(msgspec.msgpack.encode(Manifest(2, entries(4), [], 4096))).entries == entries(4)
