"""What a coordinator remembers across its own end."""

import pytest

from verl_mux.coordinator import journal as journal_module
from verl_mux.coordinator import messages as m
from verl_mux.coordinator.events import Event
from verl_mux.coordinator.journal import Journal
from verl_mux.errors import UserError

SIDES = {"rollout": ["r0"], "train": ["t0"]}


def take(journal, machine, now, what):
    machine.handle(event := Event(now, what))
    if machine.changes(event):
        journal.append(event, machine)


def a_history(journal, machine):
    for job in "ab":
        who = {"job": job, "uid": f"{job}:1", "client": job}
        take(journal, machine, 1.0, m.Register(**who, host="h", pid=1, started=1.0, nodes=SIDES))
        take(journal, machine, 2.0, m.LeaseRequest(**who, key=job, phase="rollout", step=1, nodes=["r0"]))
        take(journal, machine, 3.0, m.Heartbeat(**who, beat=1))
        take(journal, machine, 4.0, m.MemoryReport(**who, node="r0", tags={"weights": 5}))


@pytest.fixture(params=[20_000, 3], ids=["never compacted", "compacted all the time"])
def compaction(request, monkeypatch):
    monkeypatch.setattr(journal_module, "COMPACT_EVERY", request.param)


def test_replay_gives_the_live_state_back(make, tmp_path, compaction):
    journal = Journal(tmp_path / "j.sqlite")
    machine = journal.restore(make(), "one")
    a_history(journal, machine)
    journal.close()
    again = Journal(tmp_path / "j.sqlite").restore(make(), "two")
    assert again.state == machine.state
    assert [lease.token for lease in again.state.leases.values()] == [1]
    assert [request.job for request in again.state.requests] == ["b"]


def test_mere_signs_of_life_take_no_place(make, tmp_path):
    journal = Journal(tmp_path / "j.sqlite")
    machine = journal.restore(make(), "one")
    a_history(journal, machine)
    (count,) = journal._db.execute("SELECT count(*) FROM events").fetchone()
    assert count == 6


def test_a_journal_of_another_configuration_with_unfinished_jobs_is_refused(make, tmp_path):
    journal = Journal(tmp_path / "j.sqlite")
    a_history(journal, journal.restore(make(), "one"))
    journal.close()
    with pytest.raises(UserError, match=r"another configuration and holds unfinished jobs \(a, b\)"):
        Journal(tmp_path / "j.sqlite").restore(make(lease_timeout=9), "two")


def test_tokens_go_on_rising_when_the_configuration_changed_between_runs(make, tmp_path):
    journal = Journal(tmp_path / "j.sqlite")
    machine = journal.restore(make(), "one")
    a_history(journal, machine)
    for job in "ab":
        take(journal, machine, 5.0, m.Deregister(job=job, uid=f"{job}:1", client=job))
    journal.close()
    again = Journal(tmp_path / "j.sqlite").restore(make(lease_timeout=9), "two")
    assert (again.state.token, again.state.jobs) == (machine.state.token, {})


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    (tmp_path / "j.sqlite").write_text("something else entirely, and long enough to be looked at" * 20)
    with pytest.raises(UserError, match="cannot be used: file is not a database"):
        Journal(tmp_path / "j.sqlite")


def test_a_journal_in_use_is_refused_to_a_second_coordinator(make, tmp_path):
    first = Journal(tmp_path / "j.sqlite")
    first.restore(make(), "one")
    with pytest.raises(UserError, match="cannot be used: database is locked"):
        Journal(tmp_path / "j.sqlite")
    first.close()
    Journal(tmp_path / "j.sqlite").restore(make(), "two")
