"""The coordinator killed at each kind of message: nobody notices; and the measure finds what it must."""

from bench.protocol_model.schedules import TYPES, kill_at_each, name
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m


def test_every_message_of_a_job_is_one_at_which_it_dies():
    assert set(TYPES) == set(m.FromJob.__subclasses__())
    found = kill_at_each(range(1, 2))
    assert found.schedules == 3 * len(TYPES) and all(found.faults[name(kind)] == 3 for kind in TYPES)


def test_all_jobs_finish_wherever_it_died():
    found = kill_at_each(range(100, 100 + examples(5)))
    assert not found.violations, found.again


def test_a_journal_that_writes_nothing_is_noticed():
    assert kill_at_each(range(1, 2), "journal skipped").violations
