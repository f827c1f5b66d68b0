"""What a run has and lacks of the table of events, on logs made for it."""

import sys

import pytest

from tests.profiling.eventlog import occurring
from tests.profiling.eventlog.why_absent import LACKING, WITHOUT
from verl_mux.profiling.eventlog import events


@pytest.fixture
def run(tmp_path):
    from verl_mux.profiling.eventlog.log import EventLog

    def log(role, *lines):
        with_role = EventLog(tmp_path, role=role, job="a")
        for name, extra in lines:
            with_role.log(name, 1.0, extra)
        with_role.close()
        return occurring.keys_by_event([tmp_path])

    log.folder = tmp_path
    return log


def test_every_reason_is_for_names_of_the_table_and_no_name_has_two():
    names = [name for those in LACKING.values() for name in those]
    keys = {f"{event.name}.{key}" for event in events.TABLE for key in occurring.documented_keys(event)}
    assert set(names) <= {event.name for event in events.TABLE if event.written} | keys
    assert len(names) == len(set(names))
    assert set(WITHOUT) <= set(occurring.LEVELS)


def test_what_does_not_occur_is_told_with_its_reason(run):
    told = occurring.reasons(run("rollout", (events.REQUEST_START, {"request_id": "p_0"})))
    assert told["its agent loop calls no tool"] == {events.TOOL_EXECUTION}
    assert events.LEASE_HELD in told["no coordinator"]
    assert {f"{events.REQUEST_START}.session", events.REWARD} <= told[""]


def test_a_reason_does_not_hold_where_a_part_of_what_it_is_for_occurs(run):
    told = occurring.reasons(run("trainer", (events.VALUES, {})))
    assert "no critic" not in told
    assert events.UPDATE_CRITIC in told[""]


def test_a_name_that_two_write_occurs_where_one_of_them_does(run):
    told = occurring.reasons(run("trainer", (events.LEASE_WAIT, {"phase": "train", "nodes": ["t0"], "token": 1})))
    assert events.LEASE_WAIT not in set().union(*told.values())


def test_the_command_prints_shares_and_fails_without_a_reason(run, monkeypatch, capsys):
    run("trainer", (events.VALUES, {"odd": 1}))
    monkeypatch.setattr(sys, "argv", ["occurring", str(run.folder)])
    with pytest.raises(SystemExit) as ended:
        occurring.main()
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "NO REASON KNOWN: " in out and "NOT DOCUMENTED: trainer values odd" in out
    assert out.startswith(f"events: 2 of {len({event.name for event in events.TABLE if event.written})} (3%)")
