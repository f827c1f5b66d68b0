"""Some hundred schedules of the explored protocol; `make explore` and `verl-mux bench chaos --simulated` go through more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.protocol_model.schedules import PLANTED, explore, run
from tests.exploring import examples


def test_no_schedule_violates_anything():
    found = explore(examples(150), seed=1)
    assert not found.violations, f"verl-mux bench chaos --simulated 1 --seed {found.again[0]}\n" + "\n".join(found.story)
    assert found.faults["coordinator killed"] > 100 and found.faults["stale calls"] > 100


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found(planted):
    assert explore(60, seed=1, planted=planted).violations


def test_a_seed_is_one_schedule_and_always_the_same():
    assert run(7).story == run(7).story != run(8).story


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(20))
def test_no_other_schedule_does_either(seed):
    world = run(seed)
    assert not world.violations, "\n".join(world.story)
