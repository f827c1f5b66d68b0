"""Some hundred schedules of the explored protocol; `make explore` and `verl-mux bench chaos --simulated` go through more."""

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.protocol_model.schedules import TYPES, cut_off, explore, kill_at_each, name, run
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m


def test_no_schedule_violates_anything():
    found = explore(examples(150), seed=1)
    assert not found.violations, f"verl-mux bench chaos --simulated 1 --seed {found.again[0]}\n" + "\n".join(found.story)
    assert found.faults["coordinator killed"] > 100 and found.faults["stale calls"] > 100


def test_a_seed_is_one_schedule_and_always_the_same():
    assert run(7).story == run(7).story != run(8).story


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(20))
def test_no_other_schedule_does_either(seed):
    world = run(seed)
    assert not world.violations, "\n".join(world.story)


def test_every_message_of_a_job_is_one_at_which_the_coordinator_dies():
    assert set(TYPES) == set(m.FromJob.__subclasses__())
    found = kill_at_each(range(1, 2))
    assert found.schedules == 3 * len(TYPES) and all(found.faults[name(kind)] == 3 for kind in TYPES)


def test_all_jobs_finish_wherever_it_died():
    found = kill_at_each(range(100, 100 + examples(5)))
    assert not found.violations, found.again


def test_a_journal_that_writes_nothing_is_noticed():
    assert kill_at_each(range(1, 2), "journal skipped").violations


def test_no_call_under_an_expired_lease_maps_memory():
    found = cut_off(200, seed=1)
    assert found.faults["network cut"] >= 200 and found.faults["stale calls"] > 50
    assert not found.violations, found.again


def test_a_fence_that_lets_everything_pass_is_noticed():
    assert cut_off(50, seed=1, planted="token unchecked").violations["mapped after expiry"] > 0
