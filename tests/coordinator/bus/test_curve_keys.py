"""Folders of keys: made whole, for one user alone; and which of them is taken for which address."""

import os
import stat

import pytest

from verl_mux.coordinator.bus import curve_keys as keys
from verl_mux.errors import UserError


@pytest.fixture
def folder(tmp_path):
    keys.make(tmp_path / "keys")
    return tmp_path / "keys"


def test_a_folder_of_keys_is_for_its_user_alone(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {f"{name}.{kind}" for name in ("server", *keys.ROLES) for kind in ("key", "key_secret")}
    assert {file.name for file in folder.iterdir()} == names
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert [entry.name for entry in folder.parent.iterdir()] == ["keys"]


def test_keys_are_never_replaced(folder):
    before = (folder / "server.key").read_text()
    with pytest.raises(UserError, match="is there already, and keys are never replaced"):
        keys.make(folder)
    assert (folder / "server.key").read_text() == before


def test_keys_that_cannot_be_made_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make keys in"):
        keys.make(tmp_path / "file" / "keys")


def test_a_client_takes_the_key_of_its_role_or_the_one_that_it_has(folder):
    assert keys.for_address("tcp://h:1", folder, keys.VIEWER).source.name == "viewer.key_secret"
    (folder / "viewer.key_secret").unlink()
    (folder / "job.key_secret").unlink()
    assert keys.for_address("tcp://h:1", folder, keys.VIEWER).source.name == "operator.key_secret"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), "cannot read the key .*: no such file; `verl-mux keys DIR` makes"),
        (lambda file: file.write_text("nonsense"), "not a key file"),
        (lambda file: file.write_text('curve\n public-key = "short"\n secret-key = "short"\n'), "holds a damaged key"),
        (lambda file: file.chmod(0o640), r"may be read by others \(mode 640\); `chmod 600` it"),
    ],
)
def test_a_key_that_cannot_be_used_is_one_line(folder, damage, words):
    damage(folder / "server.key_secret")
    with pytest.raises(UserError, match=words):
        keys.for_bind("tcp://0.0.0.0:5570", folder)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        *(
            (where, True)
            for where in ("tcp://127.0.0.1:5570", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///tmp/x", "tcp://127.9.9.9:1")
        ),
        *(
            (where, False)
            for where in ("tcp://0.0.0.0:5570", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://eth0:1", "tcp://host:1", "x")
        ),
    ],
)
def test_only_loopback_is_local(address, local):
    assert keys.is_local(address) is local


def test_where_others_reach_it_keys_must_be_named():
    with pytest.raises(UserError, match=r"tcp://0.0.0.0:1 can be reached from other machines.*verl-mux keys DIR.*--keys DIR"):
        keys.for_bind("tcp://0.0.0.0:1", None)


def test_an_address_without_a_transport_is_no_address_of_other_machines():
    with pytest.raises(UserError, match=r"--bind 127.0.0.1:5570 has no transport: tcp://127.0.0.1:5570 is meant"):
        keys.for_bind("127.0.0.1:5570", None)


def test_on_one_machine_a_user_finds_his_own_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(keys.KEYS_VARIABLE, raising=False)
    client = keys.for_address("tcp://127.0.0.1:5570", None, keys.JOB)  # before any coordinator was there
    server = keys.for_bind("tcp://127.0.0.1:5570", None)
    assert client.server == server.public
    assert server.roles[client.public] == keys.JOB
    assert keys.for_bind("tcp://127.0.0.1:5571", None) == server
    assert keys.for_address("tcp://10.0.0.1:5570", None, keys.JOB) is None


def test_the_environment_names_a_folder(folder, monkeypatch):
    monkeypatch.setenv(keys.KEYS_VARIABLE, os.fspath(folder))
    assert keys.for_address("tcp://10.0.0.1:5570", None, keys.OPERATOR).source == folder / "operator.key_secret"
