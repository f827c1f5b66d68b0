"""The journal's files: numbered frames, the epoch beside them, and the lock.

Runs in the coordinator's process (`verl-mux run` makes an empty journal with it too); called by journal.py; touches the disk
alone.

    frame 0, frame 1, ..., frame n - 1, end mark

Each write puts one frame over the end mark and a new end mark behind it, and is on disk before the next one begins. So
- a file without its end mark was cut, or the power failed during a write: what is before that place is right, and no client has
  seen anything of what came after it unless the file was cut;
- a bad frame with a good one behind it was good once: the file was damaged.

Each checksum covers the frame's mark, number, length and body, and depends on frame 0: a frame of another file does not pass.

The epoch file names the journal beside it and counts the starts of coordinators with it. It is raised, and on disk, before a
coordinator grants its first token. So tokens rise even if the journal is lost, and a journal that is gone, was emptied or comes
from an old copy is noticed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from verl_mux.coordinator.bus.curve_keys import state_folder
from verl_mux.errors import UserError

_HEAD = struct.Struct("<4sQI16s")  # mark, number, bytes of the body, checksum
_FRAME, _END = b"vmxF", b"vmxE"
# With a number below 2**24: what a job says may hold the mark thousands of times.
_MAY_BE_FRAME = re.compile(_FRAME + rb"(?=[\s\S]{3}\x00{5})")


class Damaged(ValueError):
    """Not a journal, or no longer what was written. The message says where."""


class Contents(NamedTuple):
    """`lost`: why the last frames may be missing; None: the file is whole."""

    frames: list[bytes]
    lost: str | None


def parse(data: bytes) -> Contents:
    """Raises Damaged unless frame 0 and all that can be read after it are as they were written."""
    frames: list[bytes] = []
    at, salt = 0, 0
    while (frame := _frame_at(data, at, salt)) is not None and frame.number == len(frames):
        if frame.mark == _END:
            behind = len(data) - frame.stop
            return Contents(frames, f"{behind} bytes stand behind its end" if behind else None)
        frames.append(frame.body)
        salt, at = salt or frame.salt, frame.stop
    if not frames:
        raise Damaged("its first record is not one of a verl-mux journal")
    # A good frame anywhere behind: so there was a good one here.
    for good_behind in (found.start() for found in _MAY_BE_FRAME.finditer(data, at + 1)):
        if _frame_at(data, good_behind, salt) is not None:
            raise Damaged(f"it is damaged at byte {at} of {len(data)}, after {len(frames)} good records and before others")
    return Contents(frames, f"it ends at byte {len(data)} without its end mark, after {len(frames)} good records")


class _Frame(NamedTuple):
    mark: bytes
    number: int
    body: bytes
    salt: int  # for the frames that follow, if this is the first
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
    return _Frame(mark, number, body, _salt(checksum), stop)


def _salt(checksum: bytes) -> int:
    return int.from_bytes(checksum[:8], "little") or 1


def _checksum(mark: bytes, number: int, body: bytes, salt: int) -> bytes:
    return xxhash.xxh3_128_digest(struct.pack("<4sQI", mark, number, len(body)) + body, seed=salt)


def _pack(mark: bytes, number: int, body: bytes, salt: int) -> bytes:
    return _HEAD.pack(mark, number, len(body), _checksum(mark, number, body, salt)) + body


class FrameFile:
    """made, in place of what is there -> `append`... -> `close`."""

    def __init__(self, path: Path, first: bytes):
        """On disk under its name when this returns; before that, what was there stays. Raises OSError."""
        head = _pack(_FRAME, 0, first, 0)
        self._salt = _salt(_checksum(_FRAME, 0, first, 0))
        self._number, self._end, self._is_broken = 1, len(head), False
        self._file = _replace(path, head + self._end_mark(1))

    def append(self, body: bytes) -> None:
        """On disk when this returns. Raises OSError; then nothing was added, and this file takes nothing more."""
        if self._is_broken:
            raise OSError(errno.EIO, "an earlier write failed")
        self._is_broken = True
        frame = _pack(_FRAME, self._number, body, self._salt)
        try:
            _write(self._file, self._end, frame + self._end_mark(self._number + 1))
        except OSError:
            with contextlib.suppress(OSError):  # as it was: these bytes have room already
                _write(self._file, self._end, self._end_mark(self._number))
                os.ftruncate(self._file, self._end + _HEAD.size)
            raise
        self._number, self._end, self._is_broken = self._number + 1, self._end + len(frame), False

    def _end_mark(self, number: int) -> bytes:
        return _pack(_END, number, b"", self._salt)

    def close(self) -> None:
        os.close(self._file)


def _replace(path: Path, data: bytes) -> int:
    """A new file in place of what is there, on disk when this returns; before that, what was there stays. Returns its descriptor.

    Raises OSError.
    """
    made = path.with_name(f"{path.name}.new")
    file = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write(file, 0, data)
        os.replace(made, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the name, too, is found after a power failure
        finally:
            os.close(folder)
    except BaseException:
        os.close(file)
        raise
    return file


def _write(file: int, at: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, at)
        at, left = at + written, left[written:]
    os.fdatasync(file)


class Epoch(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The epoch file. `number`: of this start of a coordinator. `journal`: the name in the journal that belongs to it.
    `unknown`: up to this token the coordinator has yet to learn from clients what its predecessors granted; 0: it knows all."""

    journal: str
    number: int
    checksum: str = ""
    unknown: int = 0


def read_epoch(path: Path) -> Epoch | None:
    """None: there is none. Raises Damaged, and OSError."""
    try:
        epoch = msgspec.json.decode(path.read_bytes(), type=Epoch)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        raise Damaged("it cannot be read") from None
    if epoch != _checked(epoch):
        raise Damaged("its checksum is wrong")
    return epoch


def write_epoch(path: Path, epoch: Epoch) -> None:
    """On disk when this returns; before that, what was there stays. Raises OSError."""
    os.close(_replace(path, msgspec.json.encode(_checked(epoch)) + b"\n"))


def _checked(epoch: Epoch) -> Epoch:
    words = f"{epoch.journal} {epoch.number}" + (f" {epoch.unknown}" if epoch.unknown else "")
    return msgspec.structs.replace(epoch, checksum=xxhash.xxh3_64_hexdigest(words.encode()))


class Lock:
    """One coordinator for one journal: two would both grant. Held from its making to `close`, or to the end of the process."""

    def __init__(self, path: Path, journal: Path):
        """Raises UserError when another process holds it, and OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 32).decode(errors="replace").strip() or "unknown"
            self.close()
            raise UserError(
                f"journal {journal} is in use by another coordinator (pid {holder}): stop that one, or name another --journal"
            ) from None
        with contextlib.suppress(OSError):  # only for messages
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._file)


def default_path(config: Path, bind: str) -> Path:
    """One journal for each configuration file and address, in the user's state folder. Raises UserError where there is none."""
    if (state := state_folder()) is None:
        raise UserError("there is no home folder to keep a journal in: name one with --journal, or say --no-journal")
    file = config.resolve()
    digest = xxhash.xxh3_64_hexdigest(f"{file} {bind}".encode())[:8]
    where = re.sub(r"[^A-Za-z0-9]+", "-", bind.rpartition("/")[2]).strip("-")
    return state / "coordinators" / f"{file.stem}-{where}-{digest}" / "journal"
