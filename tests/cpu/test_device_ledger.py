"""What living processes hold and are charged on a device without a driver, read from outside; what fails past its budget."""

import os
import subprocess
import sys

import pytest
import torch

from verl_mux.coordinator.bus import members
from verl_mux.errors import Failure
from verl_mux.platform.charges import DeviceSettings
from verl_mux_cpu import device_ledger as ledger
from verl_mux_cpu.cpu_saver import CpuMemorySaver


@pytest.fixture(autouse=True)
def device(tmp_path, monkeypatch):
    """A node `r0` with a device of 10,000 bytes; nothing of this process on it."""
    for name, value in (
        (ledger.DIRECTORY_VARIABLE, str(tmp_path)), (ledger.BUDGET_VARIABLE, "10000"), (ledger.NODE_VARIABLE, "r0"),
        (ledger.DEVICE_VARIABLE, "0"), (ledger.JOB_VARIABLE, "math"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ledger, "_tags", {})
    monkeypatch.setattr(ledger, "_charges", {})


def neighbour(words, **environment):
    """A process that does that to the ledger, and lives until its stdin is closed."""
    script = f"from verl_mux_cpu import device_ledger as ledger\n{words}\nprint('done', flush=True)\ninput()"
    started = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert started.stdout.readline() == "done\n"
    return started


def test_what_all_living_processes_of_the_device_hold_is_not_free():
    ledger.charge({"context": 1000})
    ledger.hold({"weights": 2000})
    other = neighbour("ledger.charge({'context': 500}); ledger.hold({'weights': 300})", VERL_MUX_DEVICE_JOB="code")
    elsewhere = neighbour("ledger.hold({'weights': 7})", VERL_MUX_NODE="r1")
    beside = neighbour("ledger.hold({'weights': 7})", VERL_MUX_DEVICE="1")
    assert ledger.free() == 10000 - 3000 - 800
    assert f"code (pid {other.pid})" in ledger.holders() and str(elsewhere.pid) not in ledger.holders()
    other.communicate("\n")
    assert ledger.free() == 7000
    for process in (elsewhere, beside):
        process.communicate("\n")


def test_a_process_that_ended_holds_nothing_before_its_parent_waits_for_it():
    ended = neighbour("ledger.hold({'weights': 300})")
    ended.stdin.close()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert ledger.free() == 10000 and ledger.holders() == "no process"
    ended.wait()


def test_past_the_budget_nothing_is_taken_and_the_refusal_names_the_holders():
    with pytest.raises(Failure, match="out of memory on r0: .*held by no process"):
        ledger.charge({"context": 10001})
    other = neighbour("ledger.hold({'weights': 9000})", VERL_MUX_DEVICE_JOB="code")
    with pytest.raises(ledger.DeviceFull, match=rf"out of memory on r0: .*held by code \(pid {other.pid}\)"):
        ledger.reserve({"kv_cache": 1001})
    with pytest.raises(ledger.DeviceFull):
        ledger.charge({"context": 1001})
    ledger.charge({"context": 500})
    ledger.reserve({"kv_cache": 500})
    assert ledger.free() == 0
    ledger.charge({"context": 0})
    assert ledger.free() == 500
    other.communicate("\n")


def test_a_saver_fails_as_torch_does_and_keeps_what_it_had():
    saver = CpuMemorySaver(ledger.hold, ledger.reserve)
    with saver.region("weights"):
        kept = torch.zeros(1000)
    saver.pause("weights")
    other = neighbour("ledger.hold({'weights': 9000})")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory on r0"):
        saver.resume("weights")
    assert saver.is_paused("weights") and ledger.free() == 1000
    other.communicate("\n")
    saver.resume("weights")
    assert ledger.free() == 6000
    made = []
    with pytest.raises(torch.OutOfMemoryError), saver.region("kv_cache"):
        made.append(torch.zeros(2000))
    assert kept.numel() == 1000


def test_states_that_join_a_saver_take_room_or_do_not_join():
    saver = CpuMemorySaver(ledger.hold, ledger.reserve)
    params, moments = torch.zeros(1500), torch.zeros(1500)
    saver.track("params", [params])
    assert ledger.free() == 4000
    with pytest.raises(torch.OutOfMemoryError, match="out of memory on r0: 0.00 GB are needed"):
        saver.track("optimizer", [moments])
    assert saver.mapped_bytes() == {"params": 6000, "optimizer": 0} and ledger.free() == 4000
    saver.pause("params")
    saver.track("optimizer", [moments])
    assert ledger.free() == 4000


def test_without_a_budget_nothing_is_charged_and_nothing_refused(monkeypatch):
    monkeypatch.delenv(ledger.BUDGET_VARIABLE)
    ledger.charge({"context": 10**15})
    ledger.reserve({"weights": 10**15})
    assert ledger.free() is None


def test_verls_platform_reports_the_budget():
    from verl_mux_cpu.verl_cpu import CpuPlatform

    ledger.charge({"context": 4000})
    assert CpuPlatform().device_module.mem_get_info() == (6000, 10000)


def test_settings_say_which_device_a_process_and_its_children_use(monkeypatch):
    DeviceSettings(budget=2.5).announce("code", "t1", 3)
    assert (ledger.budget(), os.environ[ledger.NODE_VARIABLE], os.environ[ledger.DEVICE_VARIABLE]) == (2_500_000_000, "t1", "3")
    monkeypatch.setenv(ledger.NODE_VARIABLE, "r0")
    DeviceSettings().announce("code", "t1", 3)
    assert os.environ[ledger.NODE_VARIABLE] == "r0"
    monkeypatch.delenv(ledger.NODE_VARIABLE)
    DeviceSettings().announce("code", "t1", 3)
    assert os.environ[ledger.NODE_VARIABLE] == "t1"


# ---------------------------------------------------------------- accounts, one for each process


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of the ledger of a device without a budget."""
    monkeypatch.setenv(ledger.DIRECTORY_VARIABLE, str(tmp_path / "ledger"))
    monkeypatch.delenv(ledger.BUDGET_VARIABLE)
    return tmp_path / "ledger"


def test_an_account_names_its_process_and_replaces_the_one_before(folder):
    ledger.hold({"weights": 5, ("actor", "params"): 7})
    ledger.hold({"weights": 0, ("actor", "params"): 7})
    ((_, account),) = ledger.accounts()
    me = members.this_process()
    assert (account.pid, account.started, account.space, account.node) == (me.pid, me.started, me.space, "r0")
    assert account.tags == {"weights": 0, "actor/params": 7}


def test_only_accounts_of_this_pid_namespace_are_read(folder):
    ledger.hold({"weights": 5})
    (folder / f"{members.SPACE}.{os.getpid()}").rename(folder / f"{members.SPACE}0.{os.getpid()}")
    assert ledger.accounts() == []


def test_an_account_that_cannot_be_written_stops_no_process(folder):
    folder.write_text("a file")
    ledger.hold({"weights": 5})


def test_the_saver_of_this_process_keeps_it(folder):
    script = (
        "import torch\nfrom verl_mux_cpu.cpu_saver import cpu_memory_saver as saver\n"
        "with saver.region('weights'):\n    kept = torch.zeros(1000)\n"
        "saver.pause('weights')\nsaver.resume('weights')\ninput()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, env=dict(os.environ))
    process.communicate(b"\n")
    ((_, account),) = ledger.accounts()
    assert account.pid == process.pid and account.tags == {"weights": 4000}
