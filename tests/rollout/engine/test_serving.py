"""What all engines' servers do alike: names of stays, the passage under a lease, and stalls."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys

import pytest

from tests.in_loop import in_loop
from verl_mux.coordinator.bus.fence import Fenced
from verl_mux.rollout.engine.serving import Passage, StallWatch, Stay, keys_of, stay_of, write_stacks


def test_a_name_says_whose_stay_it_is():
    stay = Stay("0f3c/odd_2", 12, 3, 4)
    assert stay_of(stay.new_name()) == stay
    assert keys_of(stay.new_name()) == {"request_id": "0f3c/odd_2", "turn": 3, "stay": 4}


def test_names_of_others_stay_what_they_are():
    for name in ("45bb6a77", "a/b/c/d/e", ""):
        assert stay_of(name) is None and keys_of(name) == {"request_id": name}


def test_an_abort_of_one_stay_takes_no_other():
    names = [Stay("a_1", 1, turn, stay).new_name() for turn in (1, 11) for stay in (1, 11)] + [Stay("a_1", 1, 1, 1).new_name()]
    assert not any(one.startswith(other) for one in names for other in names if one is not other)


class Engine:
    """Generates until the test says how the request ends."""

    def __init__(self):
        self.passage = Passage()
        self.running = []

    def generate(self):
        async def once():
            self.running.append(ended := asyncio.get_running_loop().create_future())
            return await ended

        return asyncio.create_task(self.passage.through(once, lambda output: output == "abort"))


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@in_loop
async def test_without_a_lease_nothing_is_generated():
    engine = Engine()
    with pytest.raises(Fenced):
        await engine.generate()
    engine.passage.fence.enter(1)
    generating = engine.generate()
    await settle()
    engine.running[0].set_result("text")
    assert await generating == "text"
    engine.passage.fence.shut()
    with pytest.raises(Fenced):
        await engine.generate()


@in_loop
async def test_what_a_pause_cut_off_or_kept_out_is_generated_when_it_is_over():
    engine = Engine()
    engine.passage.fence.enter(1)
    cut = engine.generate()
    await settle()
    engine.passage.pause()
    engine.running[0].set_result("abort")
    late = engine.generate()
    await settle()
    assert len(engine.running) == 1 and not cut.done() and not late.done()
    engine.passage.fence.reopen(1)
    engine.passage.passed()
    await settle()
    for ended in engine.running[1:]:
        ended.set_result("text")
    assert await asyncio.gather(cut, late) == ["text", "text"]


@in_loop
async def test_an_abort_without_a_pause_and_an_answer_in_spite_of_one_are_given_back():
    engine = Engine()
    engine.passage.fence.enter(1)
    aborted, answered = engine.generate(), engine.generate()
    await settle()
    engine.running[0].set_result("abort")
    assert await aborted == "abort"
    engine.passage.pause()
    engine.running[1].set_result("text")
    assert await answered == "text"


def watched(watch: StallWatch, start: float, seconds: int, running: int = 3) -> list[float]:
    """What the watch returned in `seconds` looks, a second apart."""
    seen = [watch.look(start + second, running) for second in range(seconds)]
    return [it for it in seen if it is not None]


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
    seen = path.read_text()
    assert f"  {sleeper} " in seen and "T (stopped)" in seen and "gone" in seen
