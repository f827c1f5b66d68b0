"""A host's end on this machine, spoken to as from another: what it starts, how, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from verl_mux.coordinator.bus.members import UID_VARIABLE, carriers, is_alive, member_of
from verl_mux.errors import Failure
from verl_mux.launcher import host_end
from verl_mux.launcher.host_end import HostEnd
from verl_mux.launcher.host_parts import OnHosts
from verl_mux.launcher.host_setup import BLOCK_SIZE, FIRST_PORT, Part, Raylet, RayOptions, Setup, blocks
from verl_mux.launcher.on_hosts import Run, _Host

PART = Part(host="here", command=[sys.executable, "-m", "verl_mux.launcher.host_end"], python=sys.executable)
TELL = """
import json, os, sys
keys = os.environ["VERL_MUX_KEYS"]
noted = {"environment": dict(os.environ), "keys": {name: open(f"{keys}/{name}").read() for name in os.listdir(keys)},
        "modes": [os.stat(f"{keys}/{name}").st_mode & 0o777 for name in os.listdir(keys)], "words": sys.argv}
json.dump(noted, open(sys.argv[1], "w"))
"""
# A driver with a child that has lost its parent, as Ray's processes have.
FAMILY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
open(sys.argv[1], "w").close()
time.sleep(600)
"""


# A driver whose child does not carry the mark, as two of Ray's do not once they have written a title over it.
UNMARKED = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], env={})
with open(sys.argv[1] + ".half", "w") as file:
    file.write(str(child.pid))
os.rename(sys.argv[1] + ".half", sys.argv[1])
time.sleep(600)
"""


@pytest.fixture
def host(tmp_path):
    """One that has begun; its `uid`, and what it says in `news`."""
    news: queue.SimpleQueue = queue.SimpleQueue()
    made = _Host(PART, news)
    made.uid, made.news = f"host-{uuid4().hex}", news
    made.send(_setup(tmp_path, made.uid))
    assert news.get(timeout=30)[1] == {"address": "127.0.0.1"}
    yield made
    made.close()
    for member in carriers(made.uid):
        os.kill(member.pid, 9)


def _setup(folder: Path, uid: str, part: Part = PART) -> Setup:
    return Setup(
        uid=uid, ray_token="t" * 64, environment={"GREETING": "hello"}, keys={"job.key_secret": "hidden"}, part=part,
        folder=str(folder / "job"), ray_folder=str(folder / "ray"), towards="127.0.0.1", ray=RayOptions(),
    )  # fmt: skip


def _drive(host: _Host, program: str, *words: str) -> None:
    host.send({"drive": [sys.executable, "-c", program, *words], "environment": {"RAY_ADDRESS": "1.2.3.4:5"}})


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_driver_has_the_jobs_environment_and_keys_that_are_its_users_alone(host, tmp_path):
    _drive(host, TELL, str(tmp_path / "noted"))
    assert host.news.get(timeout=30)[1] == {"code": 0}
    noted = json.loads((tmp_path / "noted").read_text())
    given = {name: noted["environment"][name] for name in (UID_VARIABLE, "RAY_ADDRESS", "GREETING")}
    assert list(given.values()) == [host.uid, "1.2.3.4:5", "hello"]
    assert noted["keys"] == {"job.key_secret": "hidden"} and noted["modes"] == [0o600]
    assert not any("hidden" in word or host.uid in word for word in noted["words"])
    host.close()
    assert not Path(noted["environment"]["VERL_MUX_KEYS"]).exists()


@pytest.mark.parametrize("how", ["end", "cut off"])
def test_nothing_of_the_job_outlives_it(host, tmp_path, how):
    _drive(host, FAMILY, str(tmp_path / "up"))
    _wait_for(tmp_path / "up")
    assert len(carriers(host.uid)) == 2
    if how == "end":
        host.send({"end": False})
        assert host._process.wait(30) == 0
    else:
        host.close()
    assert carriers(host.uid) == []


def test_what_it_started_does_not_outlive_it_without_the_mark_either(host, tmp_path):
    _drive(host, UNMARKED, str(tmp_path / "up"))
    _wait_for(tmp_path / "up")
    child = member_of(int((tmp_path / "up").read_text()))
    host.close()
    assert not is_alive(child)


def test_a_driver_is_interrupted_as_by_ctrl_c(host, tmp_path):
    _drive(host, FAMILY, str(tmp_path / "up"))
    _wait_for(tmp_path / "up")
    host.send({"interrupt": True})
    assert host.news.get(timeout=30)[1] == {"code": -2}


class TestRay:
    """`ray start` is a stand-in; the host's end runs in this process."""

    @pytest.fixture
    def end(self, tmp_path, monkeypatch):
        made = HostEnd()
        made._setup = _setup(tmp_path, f"host-{uuid4().hex}", Part(**{**_fields(PART), "raylets": [Raylet(node="r0", gpus=1)]}))
        monkeypatch.setattr(host_end, "ray_commands", lambda *_: [([sys.executable, "-c", self.program], {})])
        yield made
        made._clean_up()

    def test_it_has_several_tries(self, end, tmp_path):
        once = f"import os, sys; p = {str(tmp_path / 'tried')!r}; again = os.path.exists(p); open(p, 'w'); sys.exit(not again)"
        self.program = once
        assert end._begin().startswith("127.0.0.1:2")

    def test_one_that_never_starts_is_a_failure(self, end):
        self.program = "raise SystemExit(7)"
        with pytest.raises(Failure, match="ray start ended with exit code 7"):
            end._begin()

    def test_a_block_of_ports_has_one_holder_and_no_port_that_another_uses(self, end, monkeypatch, tmp_path):
        first = end._take_block()
        other = HostEnd()
        other._setup = end._setup
        assert (second := other._take_block()) != first
        other._clean_up()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", FIRST_PORT + second * BLOCK_SIZE + 3))
            taken.listen()
            assert (third := other._take_block()) not in (first, second)
        assert [first, second, third] == [block for block in blocks(end._setup.uid) if block in (first, second, third)]
        other._block.close()


def _fields(part: Part) -> dict:
    return {name: getattr(part, name) for name in part.__struct_fields__}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "echo hello; exit 255"], r"host there: sh -c ... ended with exit code 255"),
        (["no-such-command"], "host there: cannot run 'no-such-command'"),
    ],
)
def test_a_way_that_does_not_lead_there_is_named(command, words, monkeypatch):
    monkeypatch.setenv(UID_VARIABLE, "mark")
    spec = OnHosts(parts=[Part(host="there", command=command, python="")], folder="/", towards="127.0.0.1", role="job")
    with pytest.raises(Failure, match=words):
        Run(spec, [], queue.SimpleQueue()).run()
