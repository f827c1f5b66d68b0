"""The journal's files: cut, damaged or whole; where a journal lies by default."""

import contextlib
import random
import resource
from pathlib import Path

import pytest

from verl_mux.coordinator import journal_files as frames
from verl_mux.coordinator.journal_files import Damaged, FrameFile, default_path
from verl_mux.errors import UserError

BODIES = [b"snapshot", b"one", b"", b"three" * 9]


@pytest.fixture
def path(tmp_path):
    file = FrameFile(tmp_path / "journal", BODIES[0])
    for body in BODIES[1:]:
        file.append(body)
    file.close()
    return tmp_path / "journal"


def is_noticed(data):
    """Refused, or read as far as it is right and said to be incomplete."""
    try:
        contents = frames.parse(data)
    except Damaged:
        return True
    return contents.lost is not None and contents.frames == BODIES[: len(contents.frames)]


def test_what_was_written_is_read(path):
    assert frames.parse(path.read_bytes()) == (BODIES, None)


def test_a_cut_at_any_byte_is_noticed(path):
    data = path.read_bytes()
    assert all(is_noticed(data[:size]) for size in range(len(data)))


def test_a_flip_of_any_bit_is_noticed(path):
    data = path.read_bytes()
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        assert is_noticed(bytes(flipped)), at


def test_bytes_taken_out_put_in_or_added_anywhere_are_noticed(path):
    data, draw = path.read_bytes(), random.Random(0)
    for _ in range(2000):
        start, stop = sorted(draw.choices(range(len(data) + 1), k=2))
        changed = data[:start] + draw.randbytes(draw.choice([0, 1, 40])) + data[stop:]
        assert changed == data or is_noticed(changed)


def test_frames_of_another_file_are_none_of_this(path, tmp_path):
    other = FrameFile(tmp_path / "other", b"another snapshot")
    for body in BODIES[1:]:
        other.append(body)
    other.close()
    mine, theirs = path.read_bytes(), (tmp_path / "other").read_bytes()
    assert is_noticed(mine[: -len(theirs) // 2] + theirs[-len(theirs) // 2 :])


@contextlib.contextmanager
def no_room_beyond(size):
    """For any file of this process, so only for the length of a block: pytest writes too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_for_which_there_is_no_room_leaves_the_file_as_it_was(tmp_path):
    file = FrameFile(tmp_path / "journal", BODIES[0])
    before = (tmp_path / "journal").read_bytes()
    with pytest.raises(OSError, match="File too large"), no_room_beyond(len(before) + 50):
        file.append(b"x" * 1000)
    assert (tmp_path / "journal").read_bytes() == before
    file.close()


def test_a_new_file_takes_the_place_of_the_old_one_only_when_it_is_complete(path):
    with pytest.raises(OSError, match="File too large"), no_room_beyond(100):
        FrameFile(path, b"y" * 1000)
    assert frames.parse(path.read_bytes()) == (BODIES, None)


def test_one_for_each_configuration_file_and_address(state_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = default_path(Path("pools.yaml"), "tcp://127.0.0.1:5570")
    assert path == default_path(tmp_path / "pools.yaml", "tcp://127.0.0.1:5570")
    assert path.is_relative_to(state_folder / "verl_mux") and path.parent.name.startswith("pools-127-0-0-1-5570-")
    assert (
        len({path, default_path(Path("pools.yaml"), "tcp://127.0.0.1:1"), default_path(Path("x.yaml"), "tcp://127.0.0.1:5570")})
        == 3
    )


def test_a_relative_state_folder_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path(Path("a.yaml"), "tcp://h:1").is_relative_to(tmp_path / ".local" / "state")


def test_where_there_is_no_home_one_has_to_say(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match="name one with --journal, or say --no-journal"):
        default_path(Path("a.yaml"), "tcp://h:1")
