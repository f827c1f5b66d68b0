"""A few runs drawn by seeds; `python -m tests.profiling.detection` draws hundreds."""

import pytest

from tests.profiling import drawn_runs
from tests.profiling.detection import found_in, is_named

WAITS_FIRST = 500_003  # two jobs that begin together: one of them waits for a whole rollout, once


@pytest.mark.parametrize(("mode", "seed"), [*((mode, 500_001) for mode in drawn_runs.MODES), ("multiplexed", WAITS_FIRST)])
def test_healthy_runs_of_every_mode_are_accused_of_nothing(mode, seed):
    assert found_in(drawn_runs.draw(seed, mode=mode)) == []


@pytest.mark.parametrize(("fault", "mode"), zip(drawn_runs.FAULTS, drawn_runs.MODES, strict=True))
def test_a_fault_is_named_with_its_place(fault, mode):
    world = drawn_runs.draw(1, mode=mode, fault=fault)
    assert is_named(world, found_in(world))
