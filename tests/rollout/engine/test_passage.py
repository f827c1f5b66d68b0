"""Generations are refused without a lease, and go on after a pause as if there had been none."""

import asyncio

import pytest

from verl_mux.coordinator.bus.fence import Fenced
from verl_mux.rollout.engine.passage import Passage


class Engine:
    """Generates until told how it ends."""

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


def test_without_a_lease_nothing_is_generated():
    async def run():
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

    asyncio.run(run())


def test_what_a_pause_cut_off_or_kept_out_is_generated_when_it_is_over():
    async def run():
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

    asyncio.run(run())


def test_an_abort_without_a_pause_and_an_answer_in_spite_of_one_are_given_back():
    async def run():
        engine = Engine()
        engine.passage.fence.enter(1)
        aborted, answered = engine.generate(), engine.generate()
        await settle()
        engine.running[0].set_result("abort")
        assert await aborted == "abort"
        engine.passage.pause()
        engine.running[1].set_result("text")
        assert await answered == "text"

    asyncio.run(run())
