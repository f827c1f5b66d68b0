"""The table of events: each name once, and the same in the documentation."""

import re

import pytest

from tests.profiling.eventlog import emitters, occurring
from tests.profiling.eventlog.occurring import TABLE
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.log import EventLog

SEED_NAMES = (  # noqa: SIM905 (a list would fill a page)
    "request_start pending_state_handling tool_creation_pending_state interaction_start_pending_state main_loop turn_start "
    "turn_pre_process turn_engine_call turn_tool_parsing turn_post_process turn_end tool_execution tool_response_processing "
    "tool_calling_state interaction_response interacting_state reward_calculation finalization async_rollout_request_complete "
    "engine_generate_setup engine_async_generate_actual preprocessing_duration async_generate_duration sorting_duration "
    "barrier_wait_duration broadcast_duration data_extraction_duration padding_duration concatenation_duration "
    "batch_construction_duration cache_flush_duration final_construction_duration step_response_length_stats "
    "total_step_duration engine_async_generate barrier async_rollout_with_monitoring_duration "
    "aborted_request_with_cancelled_error aborted_request_with_cancelled_error_padding"
).split()


def test_all_names_of_the_seeds_logs_are_known():
    known = {event.name for event in TABLE if event.origin in ("sglang", "") and event.level != "coordinator"}
    assert known == set(SEED_NAMES)


def test_a_name_stands_once_for_each_who_logs_it():
    rows = [(event.name, event.level) for event in TABLE]
    assert len(set(rows)) == len(rows)


def test_the_code_knows_the_names_of_the_table():
    assert {event.name for event in TABLE} == events.NAMES
    assert {event.name for event in TABLE if event.level == "request"} == events.OF_REQUESTS


def test_aliases_lead_to_names_and_hide_none():
    assert set(events.ALIASES.values()) <= events.NAMES
    assert not set(events.ALIASES) & events.NAMES


LEVELS = sorted({event.level for event in TABLE})


def _keys(text: str) -> set[str]:
    return set(re.findall(r"(\w+)(?: \([^)]*\))?(?:, |$)", text))


@pytest.mark.parametrize("level", LEVELS)
def test_the_table_says_exactly_which_events_we_write(level):
    written = emitters.written(level)
    marked = {event.name: event.written for event in TABLE if event.level == level}
    assert marked == {name: name in written for name in marked}


def test_whatever_we_write_is_in_the_table_for_those_who_write_it():
    of_coordinator = {event.name for event in TABLE if event.level == "coordinator"}
    assert set(emitters.written("coordinator")) <= of_coordinator
    assert set(emitters.written("request")) <= {event.name for event in TABLE if event.level != "coordinator"}


@pytest.mark.parametrize("level", LEVELS)
def test_the_table_says_exactly_which_keys_we_write(level):
    written = emitters.written(level)
    for event in TABLE:
        if event.level == level and event.written:
            assert (event.name, _keys(event.extra) - written[event.name]) == (event.name, set())
            assert (event.name, _keys(event.unwritten) & written[event.name]) == (event.name, set())


@pytest.mark.parametrize("level", LEVELS)
def test_emitters_take_the_names_from_the_table(level):
    assert emitters.bare_names(level) == []


def occurs(directory, role, *lines):
    log = EventLog(directory, role=role, job="a")
    for name, extra in lines:
        log.log(name, 1.0, extra)
    log.close()
    return occurring.keys_by_event([directory])


def test_what_does_not_occur_is_missing_and_what_has_no_row_is_undocumented(tmp_path):
    found = occurs(tmp_path, "rollout", (events.REQUEST_START, {"request_id": "p_0"}), (events.REWARD, {"odd": 1}))
    assert {events.TOOL_EXECUTION, events.LEASE_HELD, f"{events.REQUEST_START}.session"} <= occurring.missing(found)
    assert events.REWARD not in occurring.missing(found)
    assert occurring.undocumented(found) == {("rollout", events.REWARD, "odd")}


def test_a_name_that_two_write_occurs_where_one_of_them_does(tmp_path):
    found = occurs(tmp_path, "trainer", (events.LEASE_WAIT, {"phase": "train", "nodes": ["t0"], "token": 1}))
    assert events.LEASE_WAIT not in occurring.missing(found)
