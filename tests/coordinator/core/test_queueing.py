"""Which request may go next; silence beyond the lease, and phases that take too long."""

import time

import pytest

from tests.coordinator.driver import POOLS, Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core import records as r
from verl_mux.coordinator.core.records import JobState
from verl_mux.coordinator.core.settings import Segment
from verl_mux.coordinator.core.state import IllegalMove, Machine

SIDES = {"rollout": ["r0"], "train": ["t0"]}
THREE = [{"mode": "sequential", "steps": 2}, {"mode": "uncoordinated", "steps": 1}, {"mode": "interleaved"}]


class World(Driver):
    """Jobs on one rollout and one training node."""

    def __init__(self, *jobs, pools=POOLS, steps=None, **keys):
        super().__init__(Machine(config(pools=pools, **keys)))
        for job in jobs:
            self.register(job, steps=steps)

    def register(self, job, nodes=SIDES, **keys):
        super().register(job, nodes, **keys)

    def ask(self, job, phase, step, nodes=None):
        nodes = nodes or (["r0", "t0"] if phase == "init" else SIDES[phase])
        super().ask(job, phase, step, nodes, key=f"{job}{phase}{step} at {self.now}")

    def release(self, job):
        for lease in self.machine.state.leases_of(job):
            super().release(job, lease.token)

    def run(self, job, *steps):
        """Whole steps of a job that no other job keeps from running."""
        for step in steps:
            for phase in ("rollout", "train"):
                self.ask(job, phase, step)
                assert self.running(job) == [(phase, step)]
                self.release(job)

    def running(self, job):
        return [(lease.phase, lease.step) for lease in self.machine.state.leases_of(job)]

    def why_not(self, job):
        state = self.machine.state
        return [queueing.held_back(each, state, self.machine.config) for each in state.requests if each.job == job]

    def end(self, job):
        self.do(m.Deregister(**self.who(job)))


@pytest.mark.parametrize(("step", "index"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (1000, 2)])
def test_a_steps_segment_follows_from_the_lengths_of_those_before(step, index):
    lengths = [Segment(mode="sequential", steps=4), Segment(mode="uncoordinated", steps=4), Segment(mode="interleaved")]
    assert queueing.segment_of(lengths, step) == index


def test_sequential_gives_leases_only_to_the_job_whose_turn_it_is():
    world = World("a", "b", schedule=THREE)
    world.ask("b", "rollout", 1)
    assert world.why_not("b") == ["turn"]
    world.run("a", 1, 2)
    world.ask("a", "rollout", 3)
    assert world.running("b") == [("rollout", 1)]
    assert world.why_not("a") == ["barrier"]


def test_the_turn_passes_only_when_its_owner_holds_nothing_any_more():
    world = World("a", "b", schedule=THREE)
    world.ask("b", "rollout", 1)
    world.run("a", 1)
    world.ask("a", "train", 2)
    world.do(m.StepReport(**world.who("a"), step=2, metrics={}))
    assert world.why_not("b") == ["turn"]
    world.release("a")
    assert world.running("b") == [("rollout", 1)]


def test_a_barrier_opens_when_every_live_job_has_arrived_and_uncoordinated_excludes_nobody():
    world = World("a", "b", schedule=THREE)
    world.run("a", 1, 2)
    world.ask("a", "rollout", 3)
    world.run("b", 1, 2)
    assert world.running("a") == []
    world.ask("b", "rollout", 3)
    assert world.running("a") == world.running("b") == [("rollout", 3)]


def test_after_uncoordinated_comes_interleaved_and_excludes_again():
    world = World("a", "b", schedule=THREE)
    world.run("a", 1, 2)
    world.ask("a", "rollout", 3)
    world.run("b", 1, 2)
    world.ask("b", "rollout", 3)
    world.release("a")
    world.ask("a", "rollout", 4)
    assert world.why_not("a") == ["barrier"]
    world.release("b")
    world.ask("b", "rollout", 4)
    assert (world.running("a"), world.running("b"), world.why_not("b")) == ([("rollout", 4)], [], [None])


@pytest.mark.parametrize(
    "leave",
    [
        lambda world: world.end("b"),
        lambda world: world.do(r.DriverDied(job="b", uid="b:1")),
        lambda world: world.do(r.JobExited(job="b")),
        lambda world: world.do(m.StepReport(**world.who("b"), step=1, metrics={})),
    ],
    ids=["deregistered", "driver died", "said to have exited", "finished all its steps"],
)
def test_a_job_that_is_over_holds_up_no_barrier_and_keeps_no_turn(leave):
    world = World("b", "a", schedule=THREE, steps=1)
    world.machine.state.jobs["a"].steps = 9
    world.ask("a", "rollout", 1)
    assert world.why_not("a") == ["turn"]
    leave(world)
    world.release("a")
    world.run("a", 2, 3, 4)


def test_a_job_that_goes_on_beyond_the_steps_that_it_says_keeps_to_its_turn():
    world = World("a", "b", schedule=[{"mode": "sequential"}])
    world.ask("a", "rollout", 1)
    world.ask("b", "rollout", 1)
    world.do(m.StepReport(**world.who("b"), step=0, metrics={}, steps=0))
    assert world.running("b") == [] and world.why_not("b") == ["turn"]


def test_a_job_through_with_its_steps_may_still_validate_out_of_turn():
    world = World("a", "b", schedule=[{"mode": "sequential"}], steps=1)
    world.run("a", 1)
    world.do(m.StepReport(**world.who("a"), step=1, metrics={}))
    world.ask("a", "rollout", 1)
    assert world.running("a") == [("rollout", 1)]


def test_step_one_waits_until_the_expected_jobs_are_through_with_init():
    world = World("a", expect_jobs=2)
    world.ask("a", "init", 0)
    world.release("a")
    world.ask("a", "rollout", 1)
    world.register("b")
    world.ask("b", "init", 0)
    assert (world.why_not("a"), world.running("b")) == (["start"], [("init", 0)])
    world.release("b")  # which may have been the training side alone: its engines are still to come
    assert world.why_not("a") == ["start"]
    world.ask("b", "rollout", 1)
    assert world.running("a") == [("rollout", 1)]


def test_a_node_named_thousands_of_times_is_asked_for_once_and_delays_no_other_request():
    world = World("a", "b", "c")
    for number in range(m.REQUESTS_OF_A_JOB - 1):
        for job in "abc":
            asked = {"key": f"{job}{number}", "phase": "rollout", "step": 1, "nodes": ["r0"] * 4096}
            world.do(m.LeaseRequest(**world.who(job), **asked))
    began = time.process_time()
    world.do(m.LeaseRequest(**world.who("c"), key="train", phase="train", step=1, nodes=["t0"]))
    assert time.process_time() - began < 0.1 and world.holders("t0") == ["c"]
    assert all(request.nodes == ["r0"] for request in world.machine.state.requests)


def test_step_zero_is_what_comes_before_the_first_step_and_waits_for_no_gate():
    world = World("a", expect_jobs=2)
    world.ask("a", "rollout", 0)
    assert world.running("a") == [("rollout", 0)]


def test_an_expected_job_that_ended_before_its_first_step_is_not_waited_for():
    world = World("a", expect_jobs=2)
    world.ask("a", "rollout", 1)
    world.do(r.JobExited(job="b"))
    assert world.running("a") == [("rollout", 1)]


def test_init_is_exclusive_even_in_an_uncoordinated_segment():
    world = World("a", "b", "c", schedule=[{"mode": "uncoordinated"}])
    world.ask("a", "init", 0)
    world.ask("b", "init", 0)
    world.ask("c", "rollout", 1)
    assert (world.running("a"), world.running("b"), world.running("c")) == ([("init", 0)], [], [("rollout", 1)])


def test_a_job_that_joins_late_does_not_turn_the_schedule_back():
    world = World("a", schedule=THREE)
    world.run("a", 1, 2, 3)
    world.ask("a", "rollout", 4)
    world.register("late")
    world.ask("late", "rollout", 1)
    world.release("a")
    assert world.running("late") == [("rollout", 1)]
    assert world.machine.state.segment == 2


def test_what_would_let_another_job_begin():
    """Only if it waits for nobody else, and for a lease that can be parted."""
    nodes = {"rollout": {"nodes": [{"name": name} for name in ("r0", "r1", "r2")]}, "train": {"nodes": [{"name": "t0"}]}}
    world = World(pools=nodes)

    def gangs_of(job):
        return world.machine.state.jobs[job].gangs

    for job, its in {"wide": ["r0", "r1"], "one": ["r1"], "both": ["r0", "r1"], "other": ["r1", "r2"], "third": ["r2"]}.items():
        world.register(job, nodes={"rollout": its, "train": ["t0"]})
    world.ask("wide", "rollout", 1, nodes=["r0", "r1"])
    assert gangs_of("wide") == []
    world.ask("third", "rollout", 1, nodes=["r2"])
    world.ask("other", "rollout", 1, nodes=["r1", "r2"])
    assert (gangs_of("wide"), gangs_of("third")) == ([], [])
    world.release("third")
    assert gangs_of("wide") == [["r1"]]
    world.ask("both", "rollout", 1, nodes=["r0", "r1"])
    assert gangs_of("wide") == [["r1"]]
    world.end("other")
    assert gangs_of("wide") == [["r0", "r1"]]


def test_contention_names_the_nodes_that_another_job_could_use_now():
    world = World("a", "b")
    world.ask("a", "rollout", 1)
    world.ask("b", "rollout", 1)
    assert world.machine.state.jobs["a"].contended == ["r0"]
    assert world.machine.state.jobs["b"].contended == []
    world.end("b")
    assert world.machine.state.jobs["a"].contended == []


class Jobs(Driver):
    """Who of them is heard, is said."""

    def __init__(self, *jobs, **keys):
        super().__init__(Machine(config(**keys)))
        for job in jobs:
            self.register(job)

    def beat(self, *jobs):
        for job in jobs:
            tokens = [lease.token for lease in self.machine.state.leases_of(job)]
            self.do(m.Heartbeat(**self.who(job), beat=1, tokens=tokens), after=0.0)

    def live(self, seconds, *jobs):
        """Time in which only these jobs beat."""
        seen = []
        for _ in range(round(seconds * 2)):
            self.beat(*(job for job in jobs if self.state(job) is not JobState.DYING))
            seen += self.wait(0.5)
        return seen

    def state(self, job):
        return self.machine.state.jobs[job].state


@pytest.fixture
def two():
    jobs = Jobs("a", "b")
    jobs.ask("a", "rollout", 1, ["r0"])
    return jobs


def test_a_silent_job_that_nobody_waits_for_keeps_what_it_holds(two):
    assert two.live(60, "b") == [r.JobSilent(job="a", uid="a:1")]
    assert two.holders("r0") == ["a"]


def test_a_silent_job_whose_node_another_waits_for_is_over_at_the_end_of_its_lease(two):
    two.ask("b", "rollout", 1, ["r0"])
    two.live(1, "a", "b")
    heard = two.now
    seen = two.live(6, "b")
    assert [type(what) for what in seen] == [r.JobSilent, r.JobRevoked]
    assert two.state("a") is JobState.DYING
    assert two.machine.state.jobs["a"].died_at - heard == pytest.approx(5 - 1.5, abs=0.5)
    assert two.holders("r0") == ["a"], "its processes may still be there"
    with pytest.raises(IllegalMove):
        two.beat("a")
    two.do(r.ProcessesGone(job="a", uid="a:1"))
    assert two.holders("r0") == ["b"]


def test_it_is_over_at_once_when_somebody_begins_to_wait_later(two):
    two.live(60, "b")
    two.ask("b", "rollout", 1, ["r0"])
    assert [type(what) for what in two.live(0.5, "b")] == [r.JobRevoked]


def test_a_waiting_job_that_is_silent_too_takes_nothing_from_anybody(two):
    two.ask("b", "rollout", 1, ["r0"])
    assert {type(what) for what in two.live(60)} == {r.JobSilent}
    assert two.holders("r0") == ["a"]


def test_a_pause_of_the_coordinator_makes_nobody_late(two):
    two.ask("b", "rollout", 1, ["r0"])
    two.live(2, "a", "b")
    two.now += 3600
    assert two.wait(3) == []
    assert two.live(60, "a", "b") == []


def test_a_clock_that_is_set_back_makes_nobody_late_and_hides_nobody(two):
    two.ask("b", "rollout", 1, ["r0"])
    two.live(2, "a", "b")
    two.now -= 3600
    assert [type(what) for what in two.live(8, "b")] == [r.JobSilent, r.JobRevoked]


@pytest.mark.parametrize("mode", ["sequential", "barrier"])
def test_a_silent_job_does_not_hold_the_schedule_up_for_ever(mode):
    two_segments = [{"mode": "interleaved", "steps": 1}, {"mode": "interleaved"}]
    schedule = [{"mode": "sequential"}] if mode == "sequential" else two_segments
    jobs = Jobs("a", "b", schedule=schedule)
    jobs.ask("b", "rollout", 1 if mode == "sequential" else 2, ["r1"])
    assert jobs.holders("r1") == []
    assert [type(what) for what in jobs.live(7, "b")] == [r.JobSilent, r.JobRevoked]
    assert jobs.holders("r1") == ["b"]


@pytest.fixture
def hung():
    """A job whose rollouts took 100 s holds the second for 1,000 s; another waits."""

    def start(**keys):
        jobs = Jobs("a", "b", **keys)
        jobs.ask("a", "rollout", 1, ["r0"])
        jobs.live(100, "a", "b")
        jobs.release("a")
        jobs.ask("a", "rollout", 2, ["r0"])
        jobs.ask("b", "rollout", 1, ["r0"])
        assert jobs.live(1000, "a", "b") == []
        return jobs

    return start


def test_a_phase_that_takes_far_longer_than_those_before_is_told_once(hung):
    jobs = hung()
    assert jobs.live(60, "a", "b") == [r.PhaseOverdue(job="a", uid="a:1", token=2)]
    assert jobs.events_logged().count("phase_overdue") == 1
    assert jobs.holders("r0") == ["a"]
    jobs.release("a", 2)
    assert jobs.machine.state.jobs["a"].overdue == []


def test_the_first_phase_of_a_kind_is_overdue_after_a_bound_of_its_own_and_once(monkeypatch):
    monkeypatch.setattr(queueing, "OVERDUE_FIRST_S", 100.0)
    jobs = Jobs("a")
    jobs.ask("a", "rollout", 1, ["r0"])
    assert jobs.live(90, "a") == []
    assert jobs.live(20, "a") == [r.PhaseOverdue(job="a", uid="a:1", token=1)]
    assert jobs.live(100, "a") == [] and jobs.holders("r0") == ["a"]


def test_short_phases_are_never_overdue():
    jobs = Jobs("a")
    jobs.ask("a", "rollout", 1, ["r0"])
    jobs.release("a")
    jobs.ask("a", "rollout", 2, ["r0"])
    assert jobs.live(590, "a") == []


def test_an_evicted_job_ends_as_if_it_had_failed(two):
    assert two.do(r.JobEvicted(job="a", uid="a:1", reason="evicted")) == [m.JobEnded(reason="evicted")]
    assert two.machine.state.jobs["a"].condemned == "evicted"
    with pytest.raises(IllegalMove):
        two.beat("a")


def test_a_node_that_is_released_by_hand_is_taken_from_the_dying_alone():
    jobs = Jobs("a", "b", "c")
    jobs.ask("a", "rollout", 1, ["r0", "r1"])
    jobs.ask("b", "rollout", 1, ["r0"])
    jobs.do(r.NodeReleased(node="r0"))
    assert jobs.holders("r0") == ["a"]
    jobs.do(r.JobEvicted(job="a", uid="a:1", reason="evicted"))
    jobs.do(r.NodeReleased(node="r0"))
    assert (jobs.holders("r0"), jobs.holders("r1")) == (["b"], ["a"])
    jobs.do(r.NodeReleased(node="r1"))
    assert jobs.holders("r1") == []
