"""A keeper on this machine, spoken to as from another: what it starts, with which environment, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tests.launcher.cluster.test_ports import FOR_KEEPERS, held_block
from verl_mux.coordinator.bus.members import UID_VARIABLE, carriers, is_alive, member_of
from verl_mux.errors import Failure
from verl_mux.launcher.cluster import messages as m
from verl_mux.launcher.cluster.connection import Connection, Lost
from verl_mux.launcher.cluster.layout import Part

PART = Part(host="here", command=[sys.executable, "-m", "verl_mux.launcher.cluster.keeper"], python=sys.executable, raylets=[])
TELL = """
import json, os, sys
keys = os.environ["VERL_MUX_KEYS"]
told = {"environment": dict(os.environ), "keys": {name: open(f"{keys}/{name}").read() for name in os.listdir(keys)},
        "modes": [os.stat(f"{keys}/{name}").st_mode & 0o777 for name in os.listdir(keys)], "words": sys.argv}
json.dump(told, open(sys.argv[1], "w"))
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
def keeper(tmp_path):
    """A connection that is set up; its `uid`, and what it says unasked."""
    news: queue.SimpleQueue = queue.SimpleQueue()
    connection = Connection(PART, news)
    connection.uid, connection.news = f"keeper-{uuid4().hex}", news
    connection.send(
        m.Setup(
            uid=connection.uid, ray_token="t" * 64, environment={"GREETING": "hello"}, keys={"job.key_secret": "hidden"},
            folder=str(tmp_path / "job"), ray_folder=str(tmp_path / "ray"), towards="127.0.0.1",
        )
    )  # fmt: skip
    assert connection.answer() == m.Ready(address="127.0.0.1")
    yield connection
    connection.close()
    for member in carriers(connection.uid):
        os.kill(member.pid, 9)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_driver_has_the_jobs_environment_and_keys_that_are_its_users_alone(keeper, tmp_path):
    keeper.send(m.Drive(command=[sys.executable, "-c", TELL, str(tmp_path / "told")], environment={"RAY_ADDRESS": "1.2.3.4:5"}))
    assert keeper.news.get(timeout=30) == m.Driven(code=0)
    told = json.loads((tmp_path / "told").read_text())
    given = {
        name: told["environment"][name] for name in (UID_VARIABLE, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS", "GREETING")
    }
    assert list(given.values()) == [keeper.uid, "token", "t" * 64, "1.2.3.4:5", "hello"]
    assert told["keys"] == {"job.key_secret": "hidden"} and told["modes"] == [0o600]
    assert not any("hidden" in word or keeper.uid in word for word in told["words"])
    keeper.send(m.End(keep_logs=False))
    assert keeper.answer() == m.Swept()
    assert not Path(told["environment"]["VERL_MUX_KEYS"]).exists()


def test_ray_has_several_tries(keeper, tmp_path):
    once = f"import os, sys; p = {str(tmp_path / 'tried')!r}; again = os.path.exists(p); open(p, 'w'); sys.exit(not again)"
    keeper.send(m.StartRay(commands=[([sys.executable, "-c", once], {})], timeout_s=30))
    assert keeper.answer() == m.Started()


def test_ray_that_never_starts_is_said(keeper):
    keeper.send(m.StartRay(commands=[([sys.executable, "-c", "raise SystemExit(7)"], {})], timeout_s=30))
    with pytest.raises(Failure, match="host here: ray start ended with exit code 7"):
        keeper.answer()


@pytest.mark.parametrize("how", ["told", "cut off"])
def test_nothing_of_the_job_outlives_it(keeper, tmp_path, how):
    keeper.send(m.Drive(command=[sys.executable, "-c", FAMILY, str(tmp_path / "up")], environment={}))
    _wait_for(tmp_path / "up")
    assert len(carriers(keeper.uid)) == 2
    if how == "told":
        keeper.send(m.End(keep_logs=False))
        assert keeper.answer() == m.Swept()
    else:
        keeper.close()
    assert carriers(keeper.uid) == []


def test_what_it_started_does_not_outlive_it_without_the_mark_either(keeper, tmp_path):
    keeper.send(m.Drive(command=[sys.executable, "-c", UNMARKED, str(tmp_path / "up")], environment={}))
    _wait_for(tmp_path / "up")
    child = member_of(int((tmp_path / "up").read_text()))
    keeper.send(m.End(keep_logs=False))
    assert keeper.answer() == m.Swept()
    assert not is_alive(child)


def test_a_driver_is_interrupted_as_by_ctrl_c(keeper, tmp_path):
    keeper.send(m.Drive(command=[sys.executable, "-c", FAMILY, str(tmp_path / "up")], environment={}))
    _wait_for(tmp_path / "up")
    keeper.send(m.Interrupt())
    assert keeper.news.get(timeout=30) == m.Driven(code=-2)


def test_a_block_of_ports_is_given_back_with_the_connection(keeper):
    probe, block = held_block("keeper", range(FOR_KEEPERS, 200))
    probe.release()
    keeper.send(m.Hold(block=block))
    assert keeper.answer().taken is None
    other = Connection(PART, queue.SimpleQueue())
    other.send(m.Hold(block=block))
    assert other.answer().taken
    keeper.close()
    other.send(m.Hold(block=block))
    assert other.answer().taken is None
    other.close()


def test_a_way_that_does_not_lead_there_is_named():
    news: queue.SimpleQueue = queue.SimpleQueue()
    broken = Connection(Part(host="there", command=["sh", "-c", "echo hello; exit 255"], python="", raylets=[]), news)
    with pytest.raises(Failure, match=r"host there: sh -c ... ended with exit code 255"):
        broken.answer()
    assert isinstance(news.get(timeout=10), Lost)
    broken.close()
    with pytest.raises(Failure, match="host there: cannot run 'no-such-command'"):
        Connection(Part(host="there", command=["no-such-command"], python="", raylets=[]), news)
