"""The schedule of segments: start gate, barriers, turns, and what each mode excludes."""

import pytest

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.inputs_and_instructions import DriverDied, Input, JobExited
from verl_mux.coordinator.core.settings import Segment
from verl_mux.coordinator.core.state import Machine

SIDES = {"rollout": ["r0"], "train": ["t0"]}
THREE = [{"mode": "sequential", "steps": 2}, {"mode": "uncoordinated", "steps": 1}, {"mode": "interleaved"}]


class World:
    """Jobs on one rollout and one training node, driven by name."""

    def __init__(self, config, *jobs, **keys):
        self.machine, self.now = Machine(config), 0.0
        for job in jobs:
            self.register(job, **keys)

    def do(self, what):
        self.now += 1.0
        self.machine.handle(Input(self.now, what))

    def who(self, job):
        return {"job": job, "uid": f"{job}:1", "client": job}

    def register(self, job, **keys):
        self.do(m.Register(**self.who(job), host="here", pid=7, started=1, **{"nodes": SIDES, **keys}))

    def ask(self, job, phase, step, nodes=None):
        nodes = nodes or (["r0", "t0"] if phase == "init" else SIDES[phase])
        self.do(m.LeaseRequest(**self.who(job), key=f"{job}{phase}{step} at {self.now}", phase=phase, step=step, nodes=nodes))

    def release(self, job):
        for lease in self.machine.state.leases_of(job):
            self.do(m.LeaseRelease(**self.who(job), token=lease.token))

    def run(self, job, *steps):
        """Whole steps of a job that nobody keeps from running."""
        for step in steps:
            for phase in ("rollout", "train"):
                self.ask(job, phase, step)
                assert self.running(job) == [(phase, step)]
                self.release(job)

    def running(self, job):
        return [(lease.phase, lease.step) for lease in self.machine.state.leases_of(job)]

    def why_not(self, job):
        state = self.machine.state
        return [queueing.held_back(r, state, self.machine.config) for r in state.requests if r.job == job]

    def end(self, job):
        self.do(m.Deregister(**self.who(job)))


@pytest.mark.parametrize(("step", "index"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (1000, 2)])
def test_a_steps_segment_follows_from_the_lengths_of_those_before(step, index):
    lengths = [Segment(mode="sequential", steps=4), Segment(mode="uncoordinated", steps=4), Segment(mode="interleaved")]
    assert queueing.segment_of(lengths, step) == index


def test_sequential_gives_leases_only_to_the_job_whose_turn_it_is(make):
    world = World(make(schedule=THREE), "a", "b")
    world.ask("b", "rollout", 1)
    assert world.why_not("b") == ["turn"]
    world.run("a", 1, 2)
    world.ask("a", "rollout", 3)
    assert world.running("b") == [("rollout", 1)]
    assert world.why_not("a") == ["barrier"]


def test_the_turn_passes_only_when_its_owner_holds_nothing_any_more(make):
    world = World(make(schedule=THREE), "a", "b")
    world.ask("b", "rollout", 1)
    world.run("a", 1)
    world.ask("a", "train", 2)
    world.do(m.StepReport(**world.who("a"), step=2, metrics={}))
    assert world.why_not("b") == ["turn"]
    world.release("a")
    assert world.running("b") == [("rollout", 1)]


def test_a_barrier_opens_when_every_live_job_has_arrived_and_uncoordinated_excludes_nobody(make):
    world = World(make(schedule=THREE), "a", "b")
    world.run("a", 1, 2)
    world.ask("a", "rollout", 3)
    world.run("b", 1, 2)
    assert world.running("a") == []
    world.ask("b", "rollout", 3)
    assert world.running("a") == world.running("b") == [("rollout", 3)]


def test_after_uncoordinated_comes_interleaved_and_excludes_again(make):
    world = World(make(schedule=THREE), "a", "b")
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
        lambda world: world.do(DriverDied(job="b", uid="b:1")),
        lambda world: world.do(JobExited(job="b")),
        lambda world: world.do(m.StepReport(**world.who("b"), step=1, metrics={})),
    ],
    ids=["deregistered", "driver died", "said to have exited", "finished all its steps"],
)
def test_a_job_that_is_over_holds_up_no_barrier_and_keeps_no_turn(make, leave):
    world = World(make(schedule=THREE), "b", "a", steps=1)
    world.machine.state.jobs["a"].steps = 9
    world.ask("a", "rollout", 1)
    assert world.why_not("a") == ["turn"]
    leave(world)
    world.release("a")
    world.run("a", 2, 3, 4)


def test_a_job_that_goes_on_beyond_the_steps_that_it_says_keeps_to_its_turn(make):
    world = World(make(schedule=[{"mode": "sequential"}]), "a", "b")
    world.ask("a", "rollout", 1)
    world.ask("b", "rollout", 1)
    world.do(m.StepReport(**world.who("b"), step=0, metrics={}, steps=0))
    assert world.running("b") == [] and world.why_not("b") == ["turn"]


def test_a_job_through_with_its_steps_may_still_validate_out_of_turn(make):
    world = World(make(schedule=[{"mode": "sequential"}]), "a", "b", steps=1)
    world.run("a", 1)
    world.do(m.StepReport(**world.who("a"), step=1, metrics={}))
    world.ask("a", "rollout", 1)
    assert world.running("a") == [("rollout", 1)]


def test_step_one_waits_until_the_expected_jobs_are_through_with_init(make):
    world = World(make(expect_jobs=2), "a")
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


def test_step_zero_is_what_comes_before_the_first_step_and_waits_for_no_gate(make):
    world = World(make(expect_jobs=2), "a")
    world.ask("a", "rollout", 0)
    assert world.running("a") == [("rollout", 0)]


def test_an_expected_job_that_ended_before_its_first_step_is_not_waited_for(make):
    world = World(make(expect_jobs=2), "a")
    world.ask("a", "rollout", 1)
    world.do(JobExited(job="b"))
    assert world.running("a") == [("rollout", 1)]


def test_init_is_exclusive_even_in_an_uncoordinated_segment(make):
    world = World(make(schedule=[{"mode": "uncoordinated"}]), "a", "b", "c")
    world.ask("a", "init", 0)
    world.ask("b", "init", 0)
    world.ask("c", "rollout", 1)
    assert (world.running("a"), world.running("b"), world.running("c")) == ([("init", 0)], [], [("rollout", 1)])


def test_a_job_that_joins_late_does_not_turn_the_schedule_back(make):
    world = World(make(schedule=THREE), "a")
    world.run("a", 1, 2, 3)
    world.ask("a", "rollout", 4)
    world.register("late")
    world.ask("late", "rollout", 1)
    world.release("a")
    assert world.running("late") == [("rollout", 1)]
    assert world.machine.state.segment == 2


def test_a_request_that_is_held_back_stands_in_nobodys_way(make):
    world = World(make(schedule=THREE), "a", "b")
    world.ask("b", "rollout", 1)
    world.ask("a", "rollout", 1)
    assert world.running("a") == [("rollout", 1)]


def gangs_of(world, job):
    return world.machine.state.jobs[job].gangs


def test_what_would_let_another_job_begin(make):
    """Only if it waits for nobody else, and for a lease that can be parted."""
    nodes = {"rollout": {"nodes": [{"name": name} for name in ("r0", "r1", "r2")]}, "train": {"nodes": [{"name": "t0"}]}}
    world = World(make(pools=nodes))
    for job, its in {"wide": ["r0", "r1"], "one": ["r1"], "both": ["r0", "r1"], "other": ["r1", "r2"], "third": ["r2"]}.items():
        world.register(job, nodes={"rollout": its, "train": ["t0"]})
    world.ask("wide", "rollout", 1, nodes=["r0", "r1"])
    assert gangs_of(world, "wide") == []
    world.ask("third", "rollout", 1, nodes=["r2"])
    world.ask("other", "rollout", 1, nodes=["r1", "r2"])
    assert (gangs_of(world, "wide"), gangs_of(world, "third")) == ([], [])
    world.release("third")
    assert gangs_of(world, "wide") == [["r1"]]
    world.ask("both", "rollout", 1, nodes=["r0", "r1"])
    assert gangs_of(world, "wide") == [["r1"]]
    world.end("other")
    assert gangs_of(world, "wide") == [["r0", "r1"]]


def test_contention_names_the_nodes_that_another_job_could_use_now(make):
    world = World(make(), "a", "b")
    world.ask("a", "rollout", 1)
    world.ask("b", "rollout", 1)
    assert world.machine.state.jobs["a"].contended == ["r0"]
    assert world.machine.state.jobs["b"].contended == []
    world.end("b")
    assert world.machine.state.jobs["a"].contended == []
