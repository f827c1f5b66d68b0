"""Puts pieces together again: tensors leave in export order, each when its last byte is there.

piece -> staged -> (tensor complete and all before it have left) -> out

Every byte of every tensor arrives exactly once, or the sync is an error: a tensor with a hole never leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from verl_mux.sync.wire import Bucket, End, Piece, as_bytes, digest, dtype_name, dtype_of


class SyncError(RuntimeError):
    """The weights that arrived are not the trainer's of this step."""


@dataclass
class _Staged:
    """`spans`: bytes that have arrived, by offset."""

    name: str
    tensor: torch.Tensor
    missing: int
    spans: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, piece: Piece) -> _Staged:
        tensor = torch.empty(piece.shape, dtype=dtype_of(piece.dtype))
        return cls(piece.name, tensor, tensor.nbytes)

    def fits(self, piece: Piece) -> bool:
        """Whether the piece speaks of this tensor, and of bytes that it has."""
        same = (piece.name, piece.dtype, piece.shape) == (self.name, dtype_name(self.tensor.dtype), tuple(self.tensor.shape))
        return same and 0 <= piece.offset <= piece.offset + piece.nbytes <= self.tensor.nbytes

    def gapless(self) -> bool:
        """Whether the spans follow one another from the first byte on."""
        reach = 0
        for offset, nbytes in sorted(self.spans.items()):
            if offset != reach:
                return False
            reach += nbytes
        return True


class Assembly:
    """One sync on one rollout worker: version `version` from `ranks` trainer ranks."""

    def __init__(self, version: int, ranks: int, verify: bool) -> None:
        self._version, self._ranks, self._verify = version, ranks, verify
        self._staged: dict[int, _Staged] = {}
        self._next = 0
        self._ended: dict[int, End] = {}
        self.nbytes = 0

    @property
    def complete(self) -> bool:
        """Every rank has ended and every tensor has left.

        Raises:
            SyncError: every rank has ended, but bytes are missing: a rank's end comes after all its pieces on every way.
        """
        if len(self._ended) < self._ranks:
            return False
        tensors = {end.tensors for end in self._ended.values()}
        if len(tensors) > 1:
            raise SyncError(f"trainer ranks disagree on the number of tensors: {sorted(tensors)}")
        if tensors != {self._next}:
            staged = self._staged.get(self._next)
            missing = f"{staged.missing} bytes of {staged.name}" if staged else f"tensor {self._next}"
            raise SyncError(f"every trainer rank has sent all it has, but {missing} did not arrive")
        return True

    def bucket(self, bucket: Bucket, payloads: list) -> None:
        """Place a bucket's payloads (bytes-like).

        Raises:
            SyncError: another version, or bytes that are not those that were sent, or not once.
        """
        self._check_version(bucket.version)
        for piece, payload in zip(bucket.pieces, payloads, strict=True):
            if self._verify and digest(payload) != piece.digest:
                raise SyncError(f"{piece.name}: bytes {piece.offset}..{piece.offset + piece.nbytes} arrived damaged")
            self._place(piece, payload)

    def end(self, end: End) -> None:
        """A rank says that it has sent everything."""
        self._check_version(end.version)
        self._ended[end.rank] = end

    def ready(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that can leave now, in order."""
        while (staged := self._staged.get(self._next)) is not None and staged.missing == 0:
            del self._staged[self._next]
            self._next += 1
            yield staged.name, staged.tensor

    def _place(self, piece: Piece, payload) -> None:
        if piece.index < self._next:
            if piece.nbytes:
                raise SyncError(f"{piece.name} arrived twice")
            return  # a rank that holds no row of this tensor
        staged = self._staged.get(piece.index)
        if staged is None:
            staged = self._staged[piece.index] = _Staged.of(piece)
        if not staged.fits(piece) or len(payload) != piece.nbytes:
            raise SyncError(f"{piece} is no part of {staged.name}, {staged.tensor.dtype}, {tuple(staged.tensor.shape)}")
        if piece.nbytes:
            self._fill(staged, piece, payload)

    def _fill(self, staged: _Staged, piece: Piece, payload) -> None:
        if piece.offset in staged.spans or piece.nbytes > staged.missing:
            raise SyncError(f"{piece.name}: bytes {piece.offset}..{piece.offset + piece.nbytes} arrived twice")
        as_bytes(staged.tensor)[piece.offset : piece.offset + piece.nbytes] = payload
        staged.spans[piece.offset] = piece.nbytes
        if staged.missing == piece.nbytes and not staged.gapless():
            raise SyncError(f"{piece.name}: some of its bytes arrived twice, others not at all")
        staged.missing -= piece.nbytes
        self.nbytes += piece.nbytes

    def _check_version(self, version: int) -> None:
        if version != self._version:
            raise SyncError(f"rollout waits for weights of version {self._version}, the trainer sent {version}")
