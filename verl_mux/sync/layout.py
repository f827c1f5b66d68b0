"""Where each tensor of a model lies in the one region that holds them all, and into which pieces a sender cuts what it has.

Pure. Every sender lays out the same list of tensors alike and cuts its own part alike, so a piece is known by its sender and its
number: no addresses travel with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from verl_mux.sync.failure import SyncError

# Of the tensors in the region: enough for any vector load of the engine's.
ALIGN = 256
# Spans that one call to the kernel takes (IOV_MAX is 1024).
_SPANS = 512

# First byte in the region, and how many.
Span = tuple[int, int]


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of the model as the engine names it. `dtype`: torch's name without `torch.`; `tied`: index of the earlier tensor
    whose bytes are its own as well, -1: it has its own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tied: int = -1


class Manifest(msgspec.Struct, array_like=True, frozen=True):
    """What trainer rank `source` is about to send: the whole model's tensors, in the order in which engines get them, and which
    bytes of them come from it."""

    source: int
    entries: list[Entry]
    spans: list[Span]
    piece_bytes: int


class _Told(msgspec.Struct, array_like=True, frozen=True):
    """A Manifest whose entries are still as they came."""

    source: int
    entries: msgspec.Raw
    spans: list[Span]
    piece_bytes: int


class Manifests:
    """Reads those of one sync. All ranks name the same tensors, so these are decoded and kept once: 256 ranks with 46,000 tensors
    each would fill 4 GB with equal ones. Not thread-safe."""

    def __init__(self) -> None:
        self._told = b""
        self._entries: list[Entry] = []

    def read(self, body: bytes) -> Manifest:
        """Raises msgspec.MsgspecError: it is no manifest."""
        it = msgspec.msgpack.decode(body, type=_Told)
        told = bytes(it.entries)
        if told != self._told:
            self._told, self._entries = told, msgspec.msgpack.decode(told, type=list[Entry])
        return Manifest(it.source, self._entries, it.spans, it.piece_bytes)


class Layout:
    """`offsets[i]`: where entry i begins in the region of `nbytes`."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        self.offsets: list[int] = []
        self._starts: list[int] = []  # of tensors that have bytes of their own
        self._own: list[int] = []
        at = 0
        for index, entry in enumerate(self.entries):
            if entry.tied >= 0:
                self.offsets.append(self.offsets[entry.tied])
                continue
            self.offsets.append(at)
            if entry.nbytes:
                self._starts.append(at)
                self._own.append(index)
            at += -(-entry.nbytes // ALIGN) * ALIGN
        self.nbytes = at

    @property
    def spans(self) -> list[Span]:
        """Of all tensors that have bytes of their own."""
        return [(start, self.entries[index].nbytes) for start, index in zip(self._starts, self._own, strict=True)]

    def batches(self, nbytes: int) -> list[tuple[int, int]]:
        """Runs of tensors [first, last), each of `nbytes` at most or of one tensor; the same ones wherever the layout is."""
        found, first, filled = [], 0, 0
        for index, entry in enumerate(self.entries):
            if index > first and filled + entry.nbytes > nbytes:
                found.append((first, index))
                first, filled = index, 0
            filled += entry.nbytes
        return [*found, (first, len(self.entries))] if self.entries else []

    def entry_at(self, offset: int) -> int:
        """Which tensor a byte of the region belongs to."""
        return self._own[bisect_right(self._starts, offset) - 1]


def cut(spans: Sequence[Span], piece_bytes: int) -> list[list[Span]]:
    """Pieces of at most `piece_bytes`, in the order of the spans."""
    pieces: list[list[Span]] = [[]]
    room = piece_bytes
    for offset, nbytes in spans:
        while nbytes:
            if not room or len(pieces[-1]) == _SPANS:
                pieces.append([])
                room = piece_bytes
            taken = min(nbytes, room)
            pieces[-1].append((offset, taken))
            offset, nbytes, room = offset + taken, nbytes - taken, room - taken
    return pieces if pieces[-1] else pieces[:-1]


def joined(manifests: Mapping[int, Manifest]) -> Layout:
    """The layout that all senders agree on, together sending every byte of every tensor exactly once.

    Raises:
        SyncError: they speak of different models, or bytes come twice, or from nobody; with the name of a tensor.
    """
    first, *others = manifests.values()
    for other in others:
        if other.entries != first.entries:
            raise SyncError(f"trainer ranks {first.source} and {other.source} disagree on the model: {_difference(first, other)}")
    layout = Layout(first.entries)
    _check_once(layout, sorted(span for manifest in manifests.values() for span in manifest.spans if span[1] > 0))
    return layout


def _check_once(layout: Layout, found: Sequence[Span]) -> None:
    """`found`: what is sent, sorted. Raises SyncError: not every byte of the layout, exactly once."""
    at = 0
    for start, nbytes in layout.spans:
        reached, end = start, start + nbytes
        while at < len(found) and found[at][0] == reached < end:
            reached += found[at][1]
            at += 1
        if reached != end or (at < len(found) and found[at][0] < end):
            twice = reached > end or (at < len(found) and found[at][0] < reached)
            what = "is sent twice" if twice else "has no sender"
            raise SyncError(f"{layout.entries[layout.entry_at(start)].name}: byte {reached - start} of {nbytes} {what}")
    if at < len(found):
        raise SyncError(f"bytes are sent that belong to no tensor, from {found[at][0]} on")


def _difference(one: Manifest, other: Manifest) -> str:
    for a, b in zip(one.entries, other.entries, strict=False):
        if a != b:
            return f"{a.name} {a.dtype} {list(a.shape)} and {b.name} {b.dtype} {list(b.shape)}"
    return f"{len(one.entries)} and {len(other.entries)} tensors"
