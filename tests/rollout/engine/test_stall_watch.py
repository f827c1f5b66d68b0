"""When an engine is said to stand still, and what is written of its processes then."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import pytest

from verl_mux.rollout.engine.stall_watch import StallWatch, write_stacks


def watched(watch: StallWatch, start: float, seconds: int, running: int = 3) -> list[float]:
    """What it told in so many looks, a second apart."""
    told = [watch.look(start + second, running) for second in range(seconds)]
    return [it for it in told if it is not None]


def test_the_first_stall_is_counted_and_each_later_one_told_once():
    watch = StallWatch()
    watch.sent(0.0)
    assert watched(watch, 0.0, 60) == [] and watch.stalls == 1
    watch.sent(60.0)
    assert watched(watch, 60.0, 60) == [10.0] and watch.stalls == 2
    watch.sent(120.0)
    assert watched(watch, 120.0, 30) == [10.0]


def test_an_engine_that_answers_seldom_is_given_longer():
    watch = StallWatch()
    watch.look(0.0, 1)
    for answer in range(1, 20):
        watch.sent(3.0 * answer)
    watch.stalls = 1
    assert watched(watch, 57.0, 24) == [] and watched(watch, 57.0 + 24, 2) == [24.0]


def test_without_requests_nothing_stands_still():
    watch = StallWatch()
    watch.stalls = 1
    assert watched(watch, 0.0, 100, running=0) == []
    assert watched(watch, 100.0, 10) == [] and watched(watch, 110.0, 1) == [10.0]


@pytest.fixture
def sleeper():
    """A process that is stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    yield process.pid
    process.kill()
    process.wait()


def spy(folder, script: str) -> None:
    file = folder / "py-spy"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_stacks_are_pythons_where_something_can_read_them(tmp_path, monkeypatch, sleeper):
    spy(tmp_path, 'echo "stack of $4"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    path = tmp_path / "stalls" / "a.txt"
    assert write_stacks([sleeper], path) == "py-spy"
    assert f"stack of {sleeper}" in path.read_text() and str(sleeper) in path.read_text().splitlines()[0]


@pytest.mark.parametrize("script", [None, "echo not allowed >&2; exit 1"])
def test_they_are_the_kernels_where_nothing_can(tmp_path, monkeypatch, sleeper, script):
    if script:
        spy(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    path = tmp_path / "a.txt"
    assert write_stacks([sleeper, 2**22 + 1], path) == "kernel"
    told = path.read_text()
    assert f"  {sleeper} " in told and "T (stopped)" in told and "gone" in told
