"""The state machine: what each event does in each state."""

import msgspec
import pytest

from tests.coordinator.driver import SIDES, Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import state
from verl_mux.coordinator.core.records import DriverDied, Input, JobExited, JobSilent, JobState, ProcessesGone, State
from verl_mux.coordinator.core.state import MOVES, Fault, IllegalMove, Machine, UnknownJob


def copied(state):
    """As a journal gives it back."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State)


@pytest.fixture
def two():
    """Jobs a and b, registered."""
    driver = Driver(Machine(config()))
    driver.register("a")
    driver.register("b")
    return driver


@pytest.fixture
def held(two):
    """Job a holds r0."""
    two.ask("a", "rollout", 1, ["r0"])
    return two


@pytest.fixture
def waited(held):
    """Job b waits for it."""
    held.ask("b", "rollout", 1, ["r0"])
    return held


def test_a_free_node_is_granted_at_once_and_a_taken_one_when_it_is_released(two):
    assert two.ask("a", "rollout", 1, ["r0"]) == [
        m.LeaseGrant(epoch="", key="a.rollout.1", token=1, phase="rollout", step=1, nodes=["r0"], granted_at=3.0)
    ]
    assert two.ask("b", "rollout", 1, ["r0"]) == [m.Contended(nodes=["r0"])]
    assert two.release("a", 1) == [
        m.LeaseReleased(token=1),
        m.LeaseGrant(epoch="", key="b.rollout.1", token=2, phase="rollout", step=1, nodes=["r0"], granted_at=5.0),
        m.Contended(nodes=[]),
    ]
    wait = next(line for line in two.logged if line.event == "lease_wait" and line.extra["job"] == "b")
    assert (wait.duration, wait.step, wait.extra["nodes"], wait.extra["token"]) == (1.0, 1, ["r0"], 2)


def test_a_gang_gets_all_its_nodes_or_waits_and_later_requests_do_not_overtake_it(two):
    two.register("c")
    two.ask("a", "rollout", 1, ["r0"])
    two.ask("b", "rollout", 1, ["r1", "r0"])
    two.ask("c", "rollout", 1, ["r1"])
    assert two.holders("r1") == []
    two.release("a")
    assert (two.holders("r0"), two.holders("r1")) == (["b"], ["b"])
    two.release("b")
    assert two.holders("r1") == ["c"]


def test_a_node_given_back_before_the_rest_goes_to_who_waits_for_it_alone(two):
    two.ask("a", "rollout", 1, ["r0", "r1"])
    two.ask("b", "rollout", 1, ["r1"])
    two.do(m.LeaseShrink(**two.who("a"), key="s1", token=1, nodes=["r1"]))
    assert (two.holders("r0"), two.holders("r1")) == (["a"], ["b"])
    held = next(line for line in two.logged if line.event == "lease_held")
    assert (held.extra["nodes"], held.extra["token"]) == (["r1"], 1)
    two.do(m.LeaseShrink(**two.who("a"), key="s2", token=1, nodes=["r0"]))
    assert two.holders("r0") == ["a"], "the last node goes back with the lease"
    two.release("a", 1)
    assert two.holders("r0") == []


def test_a_repeated_request_is_answered_like_the_first(two):
    grant = two.ask("a", "rollout", 1, ["r0"])
    assert two.ask("a", "rollout", 1, ["r0"]) == grant
    two.ask("b", "rollout", 1, ["r0"])
    assert two.ask("b", "rollout", 1, ["r0"]) == []
    assert len(two.machine.state.requests) == 1


def test_a_repeated_release_is_answered_like_the_first(held):
    first = held.release("a", 1)
    held.ask("b", "rollout", 1, ["r0"])
    assert first == held.release("a", 1) == [m.LeaseReleased(token=1)]
    assert held.holders("r0") == ["b"]
    held.machine = Machine(held.machine.config, "restarted", copied(held.machine.state))
    assert held.release("a", 1) == first
    held.machine = Machine(held.machine.config, "without memory")
    held.register("a", again=True)
    assert held.release("a", 1) == first


def test_releases_are_remembered_up_to_a_limit(two):
    for step in range(1, 201):
        two.ask("a", "rollout", step, ["r0"])
        two.release("a")
    assert two.release("a", 200) == [m.LeaseReleased(token=200)]
    assert len(two.machine.state.jobs["a"].closed) == 64


def test_the_token_of_another_job_is_not_released(held):
    reason = "token 1 is stale: the lease was taken away before its release"
    assert held.release("b", 1) == [m.LeaseLost(token=1, reason=reason)]
    assert held.holders("r0") == ["a"]


def test_a_repeated_shrink_is_answered_like_the_first_and_takes_nothing_from_who_came_after(two):
    two.ask("a", "rollout", 1, ["r0", "r1"])
    shrink = m.LeaseShrink(**two.who("a"), key="s", token=1, nodes=["r1"])
    assert two.do(shrink) == [m.LeaseShrunk(key="s")]
    two.ask("b", "rollout", 1, ["r1"])
    assert two.do(shrink) == [m.LeaseShrunk(key="s")]
    two.release("a", 1)
    assert two.do(shrink) == [m.LeaseShrunk(key="s")]
    assert two.holders("r1") == ["b"]


def test_a_cancel_takes_the_request_out_of_its_queue_or_frees_the_granted_nodes_and_is_answered_each_time(waited):
    for job in "ba":
        key = f"{job}.rollout.1"
        cancel = m.LeaseCancel(**waited.who(job), key=key)
        assert m.LeaseCancelled(key=key) in waited.do(cancel)
        assert waited.do(cancel) == [m.LeaseCancelled(key=key)]
    assert waited.machine.state.requests == [] and waited.holders("r0") == []


def test_every_goodbye_is_answered(two):
    assert two.do(m.Failing(**two.who("a"), reason="out of memory")) == [m.JobEnded(reason="out of memory")]
    other = {**two.who("b"), "client": "b-other"}
    two.do(m.Register(**other, nodes=SIDES, host="here", pid=7, started=1.0))
    assert two.do(m.Detach(**other)) == [m.JobEnded(reason="closed")]
    assert two.do(m.Deregister(**two.who("b"))) == [m.JobEnded(reason="finished")]


def test_a_heartbeat_tells_which_leases_hold_and_repeats_a_grant_that_did_not_arrive(two):
    grant = two.ask("a", "rollout", 1, ["r0"])[0]
    ack = m.HeartbeatAck(beat=1, epoch="", queued=[], tokens=[])
    assert two.do(m.Heartbeat(**two.who("a"), beat=1, tokens=[7])) == [grant, ack]
    assert two.do(m.Heartbeat(**two.who("a"), beat=1, tokens=[1, 7])) == [msgspec.structs.replace(ack, tokens=[1])]


def test_figures_of_a_lease_that_has_ended_are_not_taken(held):
    held.release("a", 1)
    assert held.do(m.Progress(**held.who("a"), done=1, total=2, token=1)) == []
    assert held.machine.state.jobs["a"].progress is None


def test_a_silent_job_keeps_its_nodes_and_a_sign_of_life_restores_it(held):
    assert held.wait(4.5) == []
    assert held.wait(1.5) == [JobSilent(job="a", uid="a:1"), JobSilent(job="b", uid="b:1")]
    assert held.machine.state.jobs["a"].state is JobState.SILENT
    assert held.holders("r0") == ["a"]
    held.do(m.Heartbeat(**held.who("a"), beat=2, tokens=[1]))
    assert held.machine.state.jobs["a"].state is JobState.LIVE
    assert {"job_silent", "job_resumed"} <= set(held.events_logged())


def test_a_silent_job_that_waits_keeps_its_place_but_is_not_granted(waited):
    waited.do(JobSilent(job="b", uid="b:1"))
    waited.release("a")
    assert waited.holders("r0") == []
    waited.do(m.Heartbeat(**waited.who("b"), beat=2))
    assert waited.holders("r0") == ["b"]


FAILING = m.Failing(job="a", uid="a:1", client="a-client", reason="its driver ended with ValueError")


@pytest.mark.parametrize("death", [DriverDied(job="a", uid="a:1"), JobExited(job="a"), FAILING])
def test_a_dead_jobs_nodes_come_free_when_its_processes_are_gone(held, death):
    held.ask("a", "train", 1, ["t0"])
    held.ask("b", "rollout", 1, ["r0"])
    held.do(death)
    assert (held.holders("r0"), held.holders("t0")) == (["a"], ["a"])
    sent = held.do(ProcessesGone(job="a", uid="a:1"), after=2.5)
    assert m.JobEnded(reason=held.machine.state.jobs["a"].reason) in sent
    assert (held.holders("r0"), held.holders("t0")) == (["b"], [])
    reclaimed = [line for line in held.logged if line.event == "lease_reclaimed"]
    assert [(line.duration, line.extra["phase"]) for line in reclaimed] == [(2.5, "rollout"), (2.5, "train")]


def test_a_dying_jobs_waiting_requests_are_dropped(waited):
    waited.do(DriverDied(job="b", uid="b:1"))
    assert waited.machine.state.requests == []
    waited.release("a")
    assert waited.holders("r0") == []


def test_a_second_client_that_detaches_takes_only_its_own_leases_along(two):
    other = {"job": "a", "uid": "a:1", "client": "a-actor"}
    where = {"host": "here", "pid": 8, "started": 2}
    assert not two.do(m.Register(**other, nodes=SIDES, **where))[0].first
    two.do(m.LeaseRequest(**other, key="k", phase="rollout", step=1, nodes=["r0"]))
    two.ask("a", "train", 1, ["t0"])
    two.do(m.Detach(**other))
    assert (two.holders("r0"), two.holders("t0")) == ([], ["a"])
    two.do(m.Detach(**two.who("a")))
    assert two.machine.state.jobs["a"].state is JobState.ENDED


def test_the_first_client_is_the_first_again_after_a_loss_of_memory_whoever_is_heard_before_it(two):
    where = {"nodes": SIDES, "host": "here", "space": ""}
    other = {"job": "c", "uid": "c:1", "client": "c-other"}
    again = {"job": "c", "uid": "c:1", "client": "c", "again": True, "first": True}
    assert two.do(m.Register(**other, **where, pid=8, started=2))[0].first
    said = two.do(m.Register(**again, **where, pid=7, started=1))
    assert [it.first for it in said] == [False, True]  # to the one that took itself for it, and to the other
    assert two.machine.state.jobs["c"].pid == 7
    two.do(m.LeaseRequest(job="c", uid="c:1", client="c", key="k", phase="rollout", step=1, nodes=["r0"]))
    two.do(m.Deregister(**other))  # on its way before it was told
    assert two.holders("r0") == ["c"] and two.machine.state.jobs["c"].state is JobState.LIVE
    two.do(m.Deregister(job="c", uid="c:1", client="c"))
    assert two.holders("r0") == [] and two.machine.state.jobs["c"].state is JobState.ENDED


def test_an_expected_job_that_never_registered_can_be_said_to_have_exited():
    driver = Driver(Machine(config(expect_jobs=2)))
    driver.do(JobExited(job="c"))
    assert driver.machine.state.jobs["c"].state is JobState.ENDED
    driver.register("c")
    assert driver.machine.state.jobs["c"].state is JobState.LIVE


def test_a_job_that_only_looked_whether_it_would_be_taken_leaves_no_trace():
    driver = Driver(Machine(config(expect_jobs=1)))
    driver.register("a")
    driver.do(m.Deregister(**driver.who("a")))
    assert (driver.machine.state.jobs, driver.machine.state.started, driver.machine.heard) == ({}, False, {})
    assert isinstance(driver.register("a")[0], m.Registered)


def test_the_name_of_an_ended_job_is_free_and_its_old_messages_are_unknown(held):
    held.do(m.Deregister(**held.who("a")))
    assert held.machine.state.jobs["a"].state is JobState.ENDED
    assert isinstance(held.register("a", uid="a:2")[0], m.Registered)
    with pytest.raises(UnknownJob):
        held.ask("a", "rollout", 1, ["r0"])


def test_a_late_claim_does_not_bring_a_released_lease_back(held):
    held.release("a", 1)
    claim = m.Claim(token=1, key="k", phase="rollout", step=1, nodes=["r0"], granted_at=0.0)
    held.machine.state.settle_until = held.now + 10
    held.register("a", again=True, held=[claim])
    assert held.holders("r0") == []
    assert held.release("a", 1) == [m.LeaseReleased(token=1)]


def test_a_claim_that_the_coordinator_knows_to_be_stale_is_refused(held):
    claim = m.Claim(token=1, key="k", phase="rollout", step=1, nodes=["r0"], granted_at=0.0)
    held.register("b", again=True, held=[claim])
    assert held.do(m.Heartbeat(**held.who("b"), beat=1, tokens=[1]))[-1].tokens == []
    assert held.holders("r0") == ["a"]


def test_peaks_of_tagged_bytes_are_counted_per_segment_over_all_jobs():
    schedule = [{"mode": "sequential", "steps": 1}, {"mode": "interleaved"}]
    driver = Driver(Machine(config(schedule=schedule)))
    driver.register("a")
    driver.register("b")

    def hold(job, **tags):
        driver.do(m.MemoryReport(**driver.who(job), node="r0", tags=tags))

    hold("a", weights=10)
    driver.ask("a", "rollout", 1, ["r0"])
    hold("a", kv_cache=5)
    hold("a", weights=0)
    hold("a", kv_cache=0)
    driver.release("a")
    driver.ask("a", "rollout", 2, ["r0"])
    driver.ask("b", "rollout", 1, ["r0"])
    hold("b", weights=7)
    driver.release("b")
    driver.ask("b", "rollout", 2, ["r0"])
    assert driver.machine.state.peaks == {"r0": {"init": 10, "0": 15, "1": 7}}


EVERY_EVENT = {
    m.Register: lambda d: m.Register(**d.who("a"), nodes=SIDES, host="here", pid=7, started=1),
    m.LeaseRequest: lambda d: m.LeaseRequest(**d.who("a"), key="n", phase="rollout", step=1, nodes=["r1"]),
    m.LeaseCancel: lambda d: m.LeaseCancel(**d.who("a"), key="n"),
    m.LeaseRelease: lambda d: m.LeaseRelease(**d.who("a"), token=1),
    m.LeaseShrink: lambda d: m.LeaseShrink(**d.who("a"), key="s", token=1, nodes=["r0"]),
    m.Heartbeat: lambda d: m.Heartbeat(**d.who("a"), beat=1),
    m.Progress: lambda d: m.Progress(**d.who("a"), done=1, total=2),
    m.StepReport: lambda d: m.StepReport(**d.who("a"), step=1, metrics={}),
    m.MemoryReport: lambda d: m.MemoryReport(**d.who("a"), node="r0", tags={}),
    m.HostReport: lambda d: m.HostReport(**d.who("a"), node="r0", bytes={}),
    m.PhaseNote: lambda d: m.PhaseNote(**d.who("a"), note="sync"),
    m.MemberReport: lambda d: m.MemberReport(**d.who("a"), members=[]),
    m.Detach: lambda d: m.Detach(**{**d.who("a"), "client": "a-other"}),
    m.Deregister: lambda d: m.Deregister(**d.who("a")),
    m.Failing: lambda d: m.Failing(**d.who("a"), reason="out of memory"),
    JobSilent: lambda d: JobSilent(job="a", uid="a:1"),
    DriverDied: lambda d: DriverDied(job="a", uid="a:1"),
    JobExited: lambda d: JobExited(job="a"),
    ProcessesGone: lambda d: ProcessesGone(job="a", uid="a:1"),
}
PATHS = {
    None: [],
    JobState.LIVE: [m.Register, "another client", m.LeaseRequest],
    JobState.SILENT: [m.Register, "another client", m.LeaseRequest, JobSilent],
    JobState.DYING: [m.Register, "another client", m.LeaseRequest, DriverDied],
    JobState.ENDED: [m.Register, "another client", m.LeaseRequest, m.Deregister],
}


@pytest.mark.parametrize("event", EVERY_EVENT)
@pytest.mark.parametrize("state", PATHS)
def test_every_event_in_every_state_follows_the_table_or_raises_and_changes_nothing(state, event):
    driver = Driver(Machine(config(expect_jobs=2)))
    another = msgspec.structs.replace(EVERY_EVENT[m.Register](driver), client="a-other")
    for earlier in PATHS[state]:
        driver.do(another if earlier == "another client" else EVERY_EVENT[earlier](driver))
    before = msgspec.msgpack.encode(driver.machine.state)
    after = MOVES[state].get(event)
    if state is JobState.DYING and event is m.Register:  # refused in words rather than raised
        assert isinstance(driver.do(EVERY_EVENT[event](driver))[0], m.Refused)
        after = None
    elif after is None:
        with pytest.raises((IllegalMove, UnknownJob)):
            driver.do(EVERY_EVENT[event](driver))
    if after is None:
        assert msgspec.msgpack.encode(driver.machine.state) == before
    else:
        driver.do(EVERY_EVENT[event](driver))
        assert driver.machine.state.jobs["a"].state is after


def test_a_job_that_leaves_before_its_end_says_why_and_is_remembered(two):
    two.do(m.Deregister(**two.who("a"), reason="interrupted"))
    assert (two.machine.state.jobs["a"].state, two.machine.state.jobs["a"].reason) == (JobState.ENDED, "interrupted")
    two.do(m.Deregister(**two.who("b")))
    assert "b" not in two.machine.state.jobs, "it only looked whether it would be taken"


def test_ends_of_unknown_jobs_and_ends_that_are_known_leave_nothing_behind(two):
    before = copied(two.machine.state)
    for number in range(10):
        unknown = JobExited(job=f"unknown{number}")
        assert not two.machine.changes(Input(two.now, unknown))
        two.do(unknown)
    assert two.machine.state == before
    two.do(JobExited(job="a"))
    assert not two.machine.changes(Input(two.now, JobExited(job="a")))


def test_while_jobs_are_expected_so_many_ends_are_counted_and_no_more():
    driver = Driver(Machine(config(expect_jobs=2)))
    driver.register("a")
    for number in range(10):
        driver.do(JobExited(job=f"unknown{number}"))
    assert driver.machine.state.started and len(driver.machine.state.jobs) == 3


def test_what_a_machine_fails_at_is_taken_back_however_much_it_had_handled(two, monkeypatch):
    for step in range(1, 200):
        two.now += 1
        for what in (
            m.LeaseRequest(**two.who("a"), key=str(step), phase="rollout", step=step, nodes=["r0"]),
            m.LeaseRelease(**two.who("a"), token=two.machine.state.token + 1),
            m.MemoryReport(**two.who("a"), node="nowhere", tags={}),
        ):
            two.machine.attempt(Input(two.now, what))
    before = copied(two.machine.state)
    with monkeypatch.context() as patch:
        patch.setattr(two.machine, "_settle", lambda now: 1 / 0)
        with pytest.raises(Fault):
            two.machine.attempt(Input(two.now, m.LeaseRequest(**two.who("b"), key="k", phase="rollout", step=1, nodes=["r0"])))
    assert two.machine.state == before
    two.ask("b", "rollout", 1, ["r0"])
    assert two.holders("r0") == ["b"]


def test_an_input_costs_no_copy_of_all_records(two, monkeypatch):
    copies, encode = [], state._encode
    monkeypatch.setattr(state, "_encode", lambda what: copies.append(what) or encode(what))
    for number in range(640):
        two.machine.attempt(Input(two.now, m.PhaseNote(**two.who("a"), note=str(number))))
    assert sum(isinstance(what, State) for what in copies) <= 11
