"""Lay a model out in one memory region of a host, cut it into pieces, and collect the pieces.

Runs in trainer workers and rollout workers; called by sending.py and receiving.py. Pure, but for `Region`, which makes shared
memory. Every sender lays out the same tensors alike and cuts its part alike, so sender and number identify a piece: no addresses
travel with it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from verl_mux.platform.host_memory import room


class SyncError(RuntimeError):
    """The weights of this step did not arrive, or are not the trainer's. Names the rank, worker or tensor."""


class Lost(SyncError):
    """A connection ended, or nothing came over it in time. The other end's own error says more."""


# Alignment of tensors in the region: enough for any vector load of the engine's.
ALIGN = 256
# Spans that one call to the kernel takes (IOV_MAX is 1024).
_SPANS = 512

# First byte in the region, and how many.
Span = tuple[int, int]


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of the model as the engine names it. `dtype`: torch's name without `torch.`; `tied`: index of an earlier tensor
    with the same bytes, or -1."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tied: int = -1


class Manifest(msgspec.Struct, array_like=True, frozen=True):
    """What trainer rank `source` will send: all tensors of the model, in the order in which engines get them, and the spans of
    bytes that this rank sends. `raw`: the tensors as msgpack, since lists of 46,000 entries from each of 256 ranks would fill
    4 GB; two ranks agree on the model where these bytes are equal."""

    source: int
    raw: bytes
    spans: list[Span]
    piece_bytes: int

    @classmethod
    def of(cls, source: int, entries: Sequence[Entry], spans: list[Span], piece_bytes: int) -> Manifest:
        return cls(source, msgspec.msgpack.encode(entries), spans, piece_bytes)

    @property
    def entries(self) -> list[Entry]:
        """Decoded on each call."""
        return msgspec.msgpack.decode(self.raw, type=list[Entry])


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
        """Spans of all tensors that have bytes of their own."""
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
        """Index of the tensor that a byte of the region belongs to."""
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
    """The layout that all senders agree on, sending every byte of every tensor exactly once.

    Raises:
        SyncError: the models differ, or bytes are sent twice or not at all; with the name of a tensor.
    """
    first, *others = manifests.values()
    for other in others:
        if other.raw != first.raw:
            raise SyncError(f"trainer ranks {first.source} and {other.source} disagree on the model: {_difference(first, other)}")
    layout = Layout(first.entries)
    _check_once(layout, sorted(span for manifest in manifests.values() for span in manifest.spans if span[1] > 0))
    return layout


def _check_once(layout: Layout, found: Sequence[Span]) -> None:
    """Raises SyncError unless the sorted spans `found` cover every byte of the layout exactly once."""
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


class Assembly:
    """What has arrived of one sync: the manifests of all sources, then their pieces in any order, each exactly once.

    The last tensor is not ready before every piece has arrived, so an engine that takes all tensors has a whole, checked model.
    `sources`: trainer ranks that together send the model. `layout`: None until all manifests are there; `pieces`: by source and
    number, the spans where a piece's bytes go."""

    def __init__(self, sources: Iterable[int]) -> None:
        self._sources = frozenset(sources)
        self.manifests: dict[int, Manifest] = {}
        self.layout: Layout | None = None
        self.pieces: dict[int, list[list[Span]]] = {}
        self._arrived: dict[int, bytearray] = {}
        self._missing: list[int] = []  # bytes, by tensor
        self._whole = 0  # tensors that are complete, from the first on
        self._pieces_missing = 0

    @property
    def waiting_for(self) -> list[int]:
        """Sources whose manifest has not come."""
        return sorted(self._sources - set(self.manifests))

    def manifest(self, manifest: Manifest) -> None:
        """Raises SyncError: from an unexpected rank, a second one of a rank, or at odds with the others."""
        if manifest.source not in self._sources or manifest.source in self.manifests:
            raise SyncError(f"trainer rank {manifest.source} sent an unexpected manifest")
        if (first := next(iter(self.manifests.values()), None)) and first.raw == manifest.raw:
            manifest = msgspec.structs.replace(manifest, raw=first.raw)  # kept once
        self.manifests[manifest.source] = manifest
        if self.waiting_for:
            return
        layout = joined(self.manifests)
        self.pieces = {source: cut(each.spans, each.piece_bytes) for source, each in self.manifests.items()}
        self._arrived = {source: bytearray(len(pieces)) for source, pieces in self.pieces.items()}
        self._pieces_missing = sum(map(len, self.pieces.values()))
        self._missing = [entry.nbytes if entry.tied < 0 else 0 for entry in layout.entries]
        self._skip_whole()
        self.layout = layout

    def spans(self, source: int, number: int) -> list[Span]:
        """Where a piece goes. Raises SyncError: there is no such piece, or it has arrived already."""
        pieces = self.pieces.get(source, [])
        if not 0 <= number < len(pieces):
            raise SyncError(f"trainer rank {source} has no piece {number}")
        if self._arrived[source][number]:
            raise SyncError(f"piece {number} of trainer rank {source} arrived twice")
        return pieces[number]

    def place(self, source: int, number: int) -> None:
        """Note that the piece is in the region and checked. Raises as `spans`."""
        assert self.layout is not None
        for offset, nbytes in self.spans(source, number):
            # A span is a part of what one rank has of one tensor, so it never goes beyond the tensor.
            self._missing[self.layout.entry_at(offset)] -= nbytes
        self._arrived[source][number] = 1
        self._pieces_missing -= 1
        self._skip_whole()

    def _skip_whole(self) -> None:
        while self._whole < len(self._missing) and not self._missing[self._whole]:
            self._whole += 1

    @property
    def complete(self) -> bool:
        return self.layout is not None and not self._pieces_missing

    @property
    def ready(self) -> int:
        """Number of tensors that may be read, from the first on."""
        return self._whole if self.complete else min(self._whole, len(self._missing) - 1)


# The region's name in /proc.
NAME = "verl_mux_weights"
# Bytes of a host's memory that stay free beside the region.
_RESERVE = 64 << 20


class Region:
    """The memory of one host in which a model comes together and from which all its workers load.

    It has no name in any folder: the receiving process makes it (memfd) and hands its descriptor to the others, so it goes with
    the last of them, and the size of /dev/shm is no limit. `fd` can be handed to another process, which maps a Region of it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        # A mapping has at least one byte.
        self._map = mmap.mmap(fd, max(nbytes, 1))
        self.view = memoryview(self._map)[:nbytes]

    @classmethod
    def made(cls, nbytes: int) -> Region:
        """Make one with all its memory allocated, so that a lack shows now and not as a killed process later.

        Raises:
            SyncError: this host has too little memory.
        """
        free = room().available
        if nbytes > free - _RESERVE:
            raise SyncError(f"the weights need {nbytes} bytes of shared memory on this host, and {free} are free")
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, max(nbytes, 1))
            return cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise SyncError(f"the weights need {nbytes} bytes of shared memory on this host: {error.strerror}") from None

    def close(self) -> None:
        """Close the descriptor; the memory stays while views of it exist."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
        os.close(self.fd)


class Held:
    """The region that a process keeps over syncs. Not thread-safe."""

    def __init__(self) -> None:
        self._region: Region | None = None
        self._is_ours = False

    def of(self, nbytes: int) -> Region:
        """A region of this size that this process made: the last one where it fits."""
        if self._region is None or not self._is_ours or self._region.nbytes != nbytes:
            self.close()
            self._region, self._is_ours = Region.made(nbytes), True
        return self._region

    def mapped(self, fd: int, nbytes: int) -> Region:
        """The region of a received descriptor: the last one where it is the same memory."""
        if self._region is not None and os.path.sameopenfile(self._region.fd, fd):
            os.close(fd)
            return self._region
        self.close()
        self._region, self._is_ours = Region(fd, nbytes), False
        return self._region

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None
