"""Accounts of device memory where there is no device: one for each process, read from outside."""

import os
import subprocess
import sys

import pytest

from verl_mux.coordinator.bus import members
from verl_mux.platform import device_ledger


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(device_ledger.DIRECTORY_VARIABLE, str(tmp_path / "ledger"))
    return tmp_path / "ledger"


def test_an_account_names_its_process_and_replaces_the_one_before(monkeypatch):
    monkeypatch.setenv(device_ledger.NODE_VARIABLE, "r0")
    device_ledger.hold({"weights": 5, ("actor", "params"): 7})
    device_ledger.hold({"weights": 0, ("actor", "params"): 7})
    ((_, account),) = device_ledger.accounts(members.SPACE)
    me = members.this_process()
    assert (account.pid, account.started, account.space, account.node) == (me.pid, me.started, me.space, "r0")
    assert account.tags == {"weights": 0, "actor/params": 7}


def test_only_accounts_of_this_pid_namespace_are_read():
    device_ledger.hold({"weights": 5})
    assert device_ledger.accounts("another") == []


def test_an_account_that_cannot_be_written_stops_nobody(folder):
    folder.write_text("a file")
    device_ledger.hold({"weights": 5})


def test_the_saver_of_this_process_keeps_it(folder):
    script = (
        "import torch\nfrom verl_mux_cpu.cpu_saver import cpu_memory_saver as saver\n"
        "with saver.region('weights'):\n    kept = torch.zeros(1000)\n"
        "saver.pause('weights')\nsaver.resume('weights')\ninput()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, env=dict(os.environ))
    process.communicate(b"\n")
    ((_, account),) = device_ledger.accounts(members.SPACE)
    assert account.pid == process.pid and account.tags == {"weights": 4000}
