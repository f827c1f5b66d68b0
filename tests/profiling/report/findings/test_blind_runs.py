"""A few runs drawn by seeds; `python -m tests.profiling.detection` draws hundreds."""

import pytest

from tests.profiling.blind.runs import draw
from tests.profiling.blind.shapes import MODES
from tests.profiling.detection import found_in, is_named

PLANTED = {
    "plain": "slow_replica",
    "oversampled": "stalled_replica",
    "segmented": "slow_reward",
    "migrated": "kv_starvation",
    "multiplexed": "slow_node",
    "async": "slow_tool",
}


@pytest.mark.parametrize("mode", MODES)
def test_healthy_runs_of_every_mode_are_accused_of_nothing(mode):
    assert found_in(draw(1, mode, None)) == []


@pytest.mark.parametrize(("mode", "kind"), PLANTED.items())
def test_a_fault_is_named_with_its_place(mode, kind):
    run = draw(1, mode, kind)
    assert run.fault is not None and is_named(run.fault, found_in(run))
