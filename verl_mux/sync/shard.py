"""What one trainer rank sends: its manifest, and the bytes of each of its pieces where they lie."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import xxhash

from verl_mux.sync.layout import Entry, Layout, Manifest, Span, cut

# Pieces that are kept for the other hosts that want them too, while all of them are sent one: where a piece is made for sending
# (cast to the rollout's type) and not only looked at.
_KEPT = 2


@dataclass(frozen=True)
class Part:
    """Bytes [offset, offset + nbytes) of tensor `index`. `read(start, end)` gives those of them, counted from the part's
    first."""

    index: int
    offset: int
    nbytes: int
    read: Callable[[int, int], memoryview]


class Shard:
    """`made`: reading a part makes a copy (it is cast), so that a piece is read once for all hosts."""

    def __init__(
        self, source: int, entries: Sequence[Entry], parts: Iterable[Part], piece_bytes: int, made: bool = False
    ) -> None:
        layout = Layout(entries)
        self._parts = sorted((part for part in parts if part.nbytes), key=lambda part: (part.index, part.offset))
        spans = [(layout.offsets[part.index] + part.offset, part.nbytes) for part in self._parts]
        self.manifest = Manifest(source, list(entries), spans, piece_bytes)
        self.pieces = cut(spans, piece_bytes)
        self._where = self._places(spans)
        self._made = made
        self._kept: OrderedDict[int, list[memoryview]] = OrderedDict()
        self._digests: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.manifest.spans)

    def _places(self, spans: Sequence[Span]) -> list[list[tuple[int, int]]]:
        """Of each piece's spans: the part, and the first byte in it."""
        at, places = 0, []
        for piece in self.pieces:
            found = []
            for offset, nbytes in piece:
                found.append((at, offset - spans[at][0]))
                if offset + nbytes == sum(spans[at]):
                    at += 1
            places.append(found)
        return places

    def payload(self, number: int) -> list[memoryview]:
        """A piece's bytes, span by span."""
        if not self._made:
            return self.read(number)
        with self._lock:
            if number not in self._kept:
                self._kept[number] = self.read(number)
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return self._kept[number]

    def read(self, number: int) -> list[memoryview]:
        """As `payload`, made anew where reading makes a copy."""
        spans = zip(self._where[number], self.pieces[number], strict=True)
        return [self._parts[part].read(start, start + nbytes) for (part, start), (_, nbytes) in spans]

    def digest(self, number: int, payload: Sequence[memoryview]) -> int:
        """Made once, however many hosts get the piece."""
        if number not in self._digests:
            self._digests[number] = digest(payload)
        return self._digests[number]


def digest(views: Iterable[memoryview]) -> int:
    """xxh3-64 of the bytes of all of them, one after the other; never 0, which says that there is none."""
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view)
    return hasher.intdigest() or 1
