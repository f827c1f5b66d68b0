"""An append-only file of numbered frames that shows whether it is whole.

    frame 0, frame 1, ..., frame n - 1, end mark

Each write puts one frame over the end mark and a new end mark behind it, and is on disk before the next one begins. So
- a file without its end mark was cut, or written to when the power failed: what is before that place is right, and what
  came after it, at most, nobody was told of unless the file was cut;
- a bad frame with a good one behind it was good once: the file was damaged.

Each checksum covers the frame's mark, number, length and body, and depends on frame 0: a frame of another file is not
taken for one of this.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

_HEAD = struct.Struct("<4sQI16s")  # mark, number, bytes of the body, checksum
_FRAME, _END = b"vmxF", b"vmxE"


class Damaged(ValueError):
    """No file of ours, or not any more what was written. The message says where."""


class Contents(NamedTuple):
    """`lost`: why the last frames may be missing; None: the file is whole."""

    frames: list[bytes]
    lost: str | None


def read(path: Path) -> Contents:
    """Raises Damaged, and OSError."""
    return parse(path.read_bytes())


def parse(data: bytes) -> Contents:
    """Raises Damaged unless frame 0 and all that can be read after it are as they were written."""
    frames: list[bytes] = []
    at, salt = 0, 0
    while (found := _frame_at(data, at, salt)) is not None and found.number == len(frames):
        if found.mark == _END:
            whole = found.stop == len(data)
            return Contents(frames, None if whole else f"{len(data) - found.stop} bytes stand behind its end")
        frames.append(found.body)
        salt = salt or found.checksum
        at = found.stop
    if not frames:
        raise Damaged("its first record is not one of a verl-mux journal")
    if _frames_behind(data, at, salt):
        raise Damaged(f"it is damaged at byte {at} of {len(data)}, after {len(frames)} good records and before others")
    return Contents(frames, f"it ends at byte {len(data)} without its end mark, after {len(frames)} good records")


class _Frame(NamedTuple):
    mark: bytes
    number: int
    body: bytes
    checksum: int
    stop: int


def _frame_at(data: bytes, at: int, salt: int) -> _Frame | None:
    if len(data) < at + _HEAD.size:
        return None
    mark, number, size, checksum = _HEAD.unpack_from(data, at)
    stop = at + _HEAD.size + size
    if mark not in (_FRAME, _END) or stop > len(data):
        return None
    body = data[at + _HEAD.size : stop]
    if _checksum(mark, number, body, salt) != checksum:
        return None
    return _Frame(mark, number, body, int.from_bytes(checksum[:8], "little") or 1, stop)


def _frames_behind(data: bytes, at: int, salt: int) -> bool:
    """Whether a good frame begins anywhere behind `at`: so there was a good one at `at`."""
    while (at := data.find(_FRAME, at + 1)) >= 0:
        if _frame_at(data, at, salt) is not None:
            return True
    return False


def _checksum(mark: bytes, number: int, body: bytes, salt: int) -> bytes:
    return xxhash.xxh3_128_digest(struct.pack("<4sQI", mark, number, len(body)) + body, seed=salt)


def _pack(mark: bytes, number: int, body: bytes, salt: int) -> bytes:
    return _HEAD.pack(mark, number, len(body), _checksum(mark, number, body, salt)) + body


class FrameFile:
    """made, in place of what is there -> `append`... -> `close`."""

    def __init__(self, path: Path, first: bytes):
        """On disk under its name when this returns; before that, what was there stays. Raises OSError."""
        head = _pack(_FRAME, 0, first, 0)
        self._salt = int.from_bytes(_HEAD.unpack_from(head)[3][:8], "little") or 1
        self._number, self._end, self._is_broken = 1, len(head), False
        made = path.with_name(f"{path.name}.new")
        self._file = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._write(0, head + self._end_mark(1))
            os.replace(made, path)
            sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, body: bytes) -> None:
        """On disk when this returns. Raises OSError; then nothing was added, and this file takes nothing more."""
        if self._is_broken:
            raise OSError(errno.EIO, "an earlier write failed")
        self._is_broken = True
        frame = _pack(_FRAME, self._number, body, self._salt)
        try:
            self._write(self._end, frame + self._end_mark(self._number + 1))
        except OSError:
            with contextlib.suppress(OSError):  # as it was: these bytes have room already
                self._write(self._end, self._end_mark(self._number))
                os.ftruncate(self._file, self._end + _HEAD.size)
            raise
        self._number, self._end, self._is_broken = self._number + 1, self._end + len(frame), False

    def _end_mark(self, number: int) -> bytes:
        return _pack(_END, number, b"", self._salt)

    def _write(self, at: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._file, left, at)
            at, left = at + written, left[written:]
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)


def sync_folder(path: Path) -> None:
    """So that a file made or renamed there is found after a power failure. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
