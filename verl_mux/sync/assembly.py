"""What has arrived of one sync: manifests, then pieces in any order, each exactly once. Pure.

    manifests of all sources --> the layout, every byte from exactly one source --> pieces --> ready: tensors complete from the
    first on

The last tensor is not ready before every piece has arrived, so who takes all tensors has taken a whole, checked model.
"""

from __future__ import annotations

from collections.abc import Iterable

from verl_mux.sync.failure import SyncError
from verl_mux.sync.layout import Layout, Manifest, Span, cut, joined


class Assembly:
    """`sources`: trainer ranks that together send the model. `layout`: None until all of them have said what they send; `pieces`:
    of each source, by number, where their bytes go."""

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
        """Raises SyncError: it is nobody's, comes twice, or does not go together with the others."""
        if manifest.source not in self._sources or manifest.source in self.manifests:
            raise SyncError(f"trainer rank {manifest.source} says what it sends, and nobody waits for that")
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
        """Where a piece goes. Raises SyncError: there is no such piece, or it is there already."""
        pieces = self.pieces.get(source, [])
        if not 0 <= number < len(pieces):
            raise SyncError(f"trainer rank {source} has no piece {number}")
        if self._arrived[source][number]:
            raise SyncError(f"piece {number} of trainer rank {source} arrived twice")
        return pieces[number]

    def place(self, source: int, number: int) -> None:
        """The piece is in the region, and is what was sent. Raises as `spans`."""
        assert self.layout is not None
        for offset, nbytes in self.spans(source, number):
            self._take_off(self.layout, offset, nbytes)
        self._arrived[source][number] = 1
        self._pieces_missing -= 1
        self._skip_whole()

    def _take_off(self, layout: Layout, offset: int, nbytes: int) -> None:
        # A span is a part of what one rank has of one tensor, so it never goes beyond the tensor.
        self._missing[layout.entry_at(offset)] -= nbytes

    def _skip_whole(self) -> None:
        while self._whole < len(self._missing) and not self._missing[self._whole]:
            self._whole += 1

    @property
    def complete(self) -> bool:
        return self.layout is not None and not self._pieces_missing

    @property
    def ready(self) -> int:
        """Tensors that may be read, from the first on."""
        return self._whole if self.complete else min(self._whole, len(self._missing) - 1)
