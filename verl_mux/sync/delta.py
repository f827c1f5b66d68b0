"""A piece as what changed in it since the sync before: which of its bytes, and their values now. Pure.

    steps: uint8, from each byte that is sent to the next, first from the one before the piece | values: uint8, as many

Bytes rather than numbers, so it goes for every type and every cut, and costs least: of a bf16 number a training step mostly
changes the low byte. A gap of more than 255 is bridged by bytes that did not change. An unchanged piece is nothing at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from verl_mux.sync.layout import Manifest, Span

# `encoding` of a piece: its bytes as they are, or as changes of what its receiver holds.
WHOLE, CHANGES = 0, 1
# A piece goes as changes where these have at most this share of its bytes; beyond it they save too little for their work.
_PAYS = 0.5
_STEP = 255


def changes(old: np.ndarray, new: np.ndarray) -> bytes | None:
    """From `old` to `new`, both uint8 of the same length; None: they would not pay."""
    at = _changed(old, new)
    if at is None:
        return None
    gaps = np.diff(at, prepend=-1)
    bridges = (gaps - 1) // _STEP
    reached = np.cumsum(bridges + 1)
    steps = np.full(reached[-1] if len(at) else 0, _STEP, np.uint8)
    steps[reached - 1] = gaps - _STEP * bridges
    found = np.concatenate([steps, new[_places(steps)]])
    return found.tobytes() if len(found) <= _PAYS * len(new) else None


def apply(body: bytes, spans: Sequence[Span], region: memoryview) -> None:
    """Put the changes of the piece that lies at these spans into the region, which holds what it was before.

    Raises:
        ValueError: that cannot be changes of this piece.
    """
    count, odd = divmod(len(body), 2)
    places = _places(np.frombuffer(body, np.uint8, count))
    offsets, sizes = np.array(spans, np.int64).T
    ends = np.cumsum(sizes)
    if odd or (count and not 0 <= places[0] <= places[-1] < ends[-1]):
        raise ValueError("changes of a piece reach beyond it")
    in_region = offsets - (ends - sizes)
    places += in_region[np.searchsorted(ends, places, "right")]
    np.frombuffer(region, np.uint8)[places] = np.frombuffer(body, np.uint8, count, count)


def stamp(manifest: Manifest, digests: Sequence[int]) -> bytes:
    """Of what a region holds of one trainer rank: two of them are equal where the layout and all bytes are. `digests`: of that
    rank's pieces."""
    hasher = hashlib.blake2b(msgspec.msgpack.encode(manifest), digest_size=16)
    hasher.update(np.array(digests, np.uint64).tobytes())
    return hasher.digest()


def _changed(old: np.ndarray, new: np.ndarray) -> np.ndarray | None:
    """Places of the bytes that differ, None where they are too many; by words first, since most are equal."""
    end = len(new) // 8 * 8
    old_words, new_words = old[:end].view(np.uint64), new[:end].view(np.uint64)
    words = np.flatnonzero(old_words != new_words)
    differ = (old_words[words] ^ new_words[words]).view(np.uint8) != 0
    if 2 * np.count_nonzero(differ) > _PAYS * len(new):
        return None
    at = np.flatnonzero(differ)
    return np.concatenate([words[at >> 3] * 8 + (at & 7), np.flatnonzero(old[end:] != new[end:]) + end])


def _places(steps: np.ndarray) -> np.ndarray:
    return np.cumsum(steps, dtype=np.int64) - 1
