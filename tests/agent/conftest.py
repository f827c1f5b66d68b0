"""Hosts on one machine: each a namespace of its own for process ids, host name and mounts. That takes root."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.coordinator.conftest import Lines, eventually, join, serve  # noqa: F401
from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.config import make_config

UNSHARE = ["unshare", "--pid", "--uts", "--mount", "--fork", "--kill-child", "--mount-proc"]
HERE = Path(__file__).parent


@pytest.fixture
def make():
    nodes = [{"name": "r0", "host": "hosta"}, {"name": "r1", "host": "hostb"}]
    defaults = {"lease_timeout": 3, "kill_grace": 0.2}
    return lambda **keys: make_config({"pools": {"rollout": {"nodes": nodes}}, **defaults, **keys})


@pytest.fixture
def event_log():
    return Lines()


class NamespaceHost:
    """A machine's worth of process ids and a host name, as long as it is open."""

    def __init__(self, name, environment):
        self.name, self._environment, self._started = name, environment, []
        script = f"hostname {name} && echo up && exec sleep 86400"
        self._init = subprocess.Popen([*UNSHARE, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert self._init.stdout.readline() == "up\n"
        self._pid = psutil.Process(self._init.pid).children()[0].pid

    def start(self, *command, uid=None, **keys):
        """The process that enters, with pipes; killing it is not killing what it started: see `kill`."""
        environment = {**self._environment, **({UID_VARIABLE: uid} if uid else {})}
        enter = ["nsenter", "-t", str(self._pid), "--pid", "--uts", "--mount", "--"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._started.append(subprocess.Popen([*enter, sys.executable, *command], env=environment, **{**pipes, **keys}))
        return self._started[-1]

    def agent(self, address, logs):
        return self.start("-m", "verl_mux", "agent", "--coordinator", address, "--log-dir", str(logs), "--devices", "ledger")

    def job(self, *arguments, uid):
        return self.start(str(HERE / "job.py"), *arguments, uid=uid)

    @staticmethod
    def kill(started, number=signal.SIGKILL):
        for process in psutil.Process(started.pid).children(recursive=True):
            process.send_signal(number)
        started.wait()

    def close(self):
        self._init.kill()  # and with it everything inside
        for process in (self._init, *self._started):
            process.wait()


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("hosts on one machine are namespaces, and making these takes root")
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine does not let even root make namespaces (unshare failed)")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "ledger").mkdir()
    monkeypatch.setenv("VERL_MUX_DEVICE_LEDGER", str(tmp_path / "ledger"))
    # The coordinator runs in this process, from which all namespaces can be seen into: that of another machine cannot.
    monkeypatch.setattr(members, "carriers", lambda uid: [])
    made = [NamespaceHost(name, dict(os.environ)) for name in ("hosta", "hostb")]
    yield made
    for host in made:
        host.close()
