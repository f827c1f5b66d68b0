"""Questions to the placer, one after the other, on a machine whose answers go astray."""

import asyncio

from tests.coordinator.core.placement.placed_jobs import placing_config, register
from tests.coordinator.driver import Driver
from verl_mux.coordinator.core.inputs_and_instructions import Input
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.server import Planning, Refusals


def test_an_answer_that_cannot_be_taken_is_counted_and_the_next_question_asked():
    machine, refusals = Machine(placing_config(count=2)), Refusals()
    for job in ("a", "b"):
        register(Driver(machine), job)

    async def answer_all():
        answers, over = [], asyncio.Event()

        def take(answer):
            answers.append(answer)
            if len(answers) == 1:
                raise RuntimeError("a fault of the machine, which has changed nothing")
            machine.handle(Input(10.0, answer))
            planning.look()
            if not machine.state.questions:
                over.set()

        planning = Planning(machine, take, lambda: 10.0, refusals)
        planning.look()
        await asyncio.wait_for(over.wait(), 30)
        planning.close()

    asyncio.run(answer_all())
    assert refusals.counts == {"faults": 1}
    (group,) = machine.state.placed.groups  # made from the record, not from the answer that was lost
    assert [job.name for job in group.jobs] == ["b"]
