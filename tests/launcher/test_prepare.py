from __future__ import annotations

import psutil
import pytest

from verl_mux.errors import Failure, UserError
from verl_mux.launcher.prepare import clean_up, prepare
from verl_mux.launcher.run_file import JobSpec, RunFile

NODES = {"rollout": ["r0"], "train": ["t0"]}


def made(directory, **keys) -> RunFile:
    return RunFile(dir=str(directory), coordinator={}, jobs={"math": JobSpec(nodes=NODES)}, **keys)


WAIT = """
import os, sys, time
with open(sys.argv[1] + ".tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""
FAIL = """
import os, sys
while not os.path.exists(sys.argv[1]): pass
sys.exit(3)
"""


def test_prepare_commands_that_still_run_end_when_one_fails(tmp_path):
    pid = tmp_path / "pid"
    with pytest.raises(Failure, match="exit code 3"):
        prepare(made(tmp_path, prepare=[["python", "-c", FAIL, str(pid)], ["python", "-c", WAIT, str(pid)]]))
    assert not psutil.pid_exists(int(pid.read_text()))


def test_a_prepare_command_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot run 'no-such-command'"):
        prepare(made(tmp_path, prepare=[["no-such-command"]]))


def test_a_prepare_command_that_refuses_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="refused"):
        prepare(made(tmp_path, prepare=[["python", "-c", "raise SystemExit(2)"]]))


def test_a_clean_up_command_that_fails_keeps_nobody_from_the_next(tmp_path, capfd):
    fails, touches = ["python", "-c", "raise SystemExit(3)"], ["touch", "{dir}/done"]
    clean_up(made(tmp_path, clean_up=[["no-such-command"], fails, touches]))
    assert (tmp_path / "done").exists()
    said = capfd.readouterr().err
    assert "cannot run 'no-such-command'" in said and "exit code 3" in said
