"""Where a journal lies when nobody says where."""

from pathlib import Path

import pytest

from verl_mux.coordinator.journal_files import default_path
from verl_mux.errors import UserError


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
