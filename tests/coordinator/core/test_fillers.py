"""When fillers get nodes and are called back, what share of the idle time they use, and that no job ever waits behind one."""

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.coordinator.driver import Driver, config
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.records import JobEvicted, JobRevoked, JobSilent, JobState, ProcessesGone
from verl_mux.coordinator.core.settings import FILLER_GRACE_S
from verl_mux.coordinator.core.snapshot import describe
from verl_mux.coordinator.core.state import Machine
from verl_mux.profiling.eventlog import events

ROLLOUT = {"rollout": ["rollout"]}


class World(Driver):
    def __init__(self, **keys):
        super().__init__(Machine(config(**keys)))
        self.machine.resume(0.0)

    def do(self, what, after=1.0):
        self.machine.due(self.now + after)  # it looks at its clock often
        return super().do(what, after)

    def fill(self, name="f", nodes=ROLLOUT, num_nodes=1, key=None, grace=0.0):
        """A filler comes, if it is not there, and asks."""
        if name not in self.machine.state.jobs:
            self.register(name, nodes, filler=True, grace=grace)
        wanted = self.machine.state.jobs[name].all_nodes
        return self.ask_as_filler(name, nodes=wanted, num_nodes=num_nodes, key=key or f"{name} at {self.now}")

    def ask_as_filler(self, name, **asked):
        return self.do(m.LeaseRequest(**self.who(name), **{"phase": "rollout", "step": 0, **asked}))

    def step(self, job, rollout_s, train_s, step):
        """One whole step of a job that runs alone."""
        for phase, node, seconds in (("rollout", "r0", rollout_s), ("train", "t0", train_s)):
            self.ask(job, phase, step, [node])
            self.now += seconds - 1.0
            self.release(job)


@pytest.fixture
def world():
    """With job `a`."""
    world = World()
    world.register("a")
    return world


@pytest.fixture
def called(world):
    """A filler holds both rollout nodes, and job `a` asks for one of them."""
    world.fill(num_nodes=2)
    world.noted = world.ask("a", "rollout", 1, ["r0"], key="k")
    return world


def test_a_filler_gets_as_many_free_nodes_as_it_asked_for_and_is_told_which(world):
    world.ask("a", "rollout", 1, ["r0"])
    world.fill()
    assert (world.holders("r0"), world.holders("r1")) == (["a"], ["f"])
    assert world.sent[-1].message.nodes == ["r1"]


def test_it_gets_all_that_it_asked_for_or_waits(world):
    world.ask("a", "rollout", 1, ["r0"])
    world.fill(num_nodes=2)
    assert world.holders("r1") == []
    world.release("a")
    assert (world.holders("r0"), world.holders("r1")) == (["f"], ["f"])


def test_it_is_not_granted_what_a_job_waits_for():
    """`b` waits for both nodes, of which one is free."""
    world = World()
    for job in "ab":
        world.register(job)
    world.ask("a", "rollout", 1, ["r0"])
    world.ask("b", "rollout", 1, ["r0", "r1"])
    world.fill()
    assert world.holders("r1") == []
    world.release("a")
    assert world.holders("r0") == world.holders("r1") == ["b"]


def test_a_request_that_is_held_back_keeps_fillers_off_too():
    world = World(expect_jobs=2)
    world.register("a")
    world.ask("a", "rollout", 1, ["r0", "r1"])
    world.fill()
    assert world.holders("r0") == []


def test_jobs_do_not_queue_behind_the_requests_of_fillers(world):
    world.register("b")
    world.ask("a", "rollout", 1, ["r0", "r1"])
    world.fill()
    world.ask("b", "rollout", 1, ["r0"])
    world.release("a")
    assert (world.holders("r0"), world.holders("r1")) == (["b"], ["f"])


def test_what_it_holds_is_called_back_when_a_job_asks_and_goes_to_the_job(called):
    assert called.noted == [m.Contended(nodes=["r0"], gangs=[["r0"]])]
    called.fill("g", num_nodes=1)
    called.release("f")
    assert (called.holders("r0"), called.holders("r1")) == (["a"], ["g"])
    (held,) = [line for line in called.logged if line.event == events.LEASE_HELD]
    assert held.extra["filler"] and held.extra["leaving_s"] is not None


def test_a_filler_that_waits_calls_nobody_back_and_no_job_is_told_of_it(world):
    world.ask("a", "rollout", 1, ["r0", "r1"])
    assert world.fill() == []
    assert world.machine.state.jobs["a"].contended == []


def test_it_is_told_again_at_each_heartbeat_for_a_push_may_go_astray(called):
    noted = called.do(m.Heartbeat(**called.who("f"), beat=1, tokens=[1]))
    assert m.Contended(nodes=["r0"], gangs=[["r0"]]) in noted


def test_one_that_does_not_leave_is_ended_after_its_grace_and_the_job_gets_the_node(called):
    assert called.wait(1.5) == []
    (ended,) = called.wait(1.5)
    assert isinstance(ended, JobEvicted) and "2 s" in ended.reason
    assert called.holders("r0") == ["f"]
    called.do(ProcessesGone(job="f", uid="f:1"))
    assert called.holders("r0") == ["a"]


@pytest.mark.parametrize(("asked", "lease_timeout", "given"), [(0.5, 60, 2), (9, 60, 9), (900, 7, 7)])
def test_one_that_says_so_has_longer_but_not_for_ever(asked, lease_timeout, given):
    world = World(lease_timeout=lease_timeout)
    world.register("a")
    world.fill(num_nodes=2, grace=asked)
    world.ask("a", "rollout", 1, ["r0"])
    since = world.now
    for beat in range(20):
        world.wait(0.5)
        if world.machine.state.jobs["f"].state is not JobState.LIVE:
            break
        world.do(m.Heartbeat(**world.who("f"), beat=beat + 1, tokens=[1]), after=0.5)
    assert given < world.now - since < given + 2


def test_one_that_is_silent_is_ended_at_once(called):
    called.do(JobSilent(job="f", uid="f:1"))
    assert [type(what) for what in called.wait(1)] == [JobRevoked]
    assert called.holders("r0") == ["f"]
    called.do(ProcessesGone(job="f", uid="f:1"))
    assert called.holders("r0") == ["a"]


def test_nobody_is_late_for_what_a_coordinator_said_that_is_no_more():
    """After a restart the time to leave begins when the filler speaks, and is noted."""
    world = World(lease_timeout=60)
    world.register("a")
    world.fill(num_nodes=2)
    world.ask("a", "rollout", 1, ["r0"])
    world.machine = Machine(world.machine.config, "again", world.machine.state)
    world.machine.resume(world.now)
    assert world.wait(3) == []
    world.do(m.Heartbeat(**world.who("f"), beat=1, tokens=[1]))
    assert [type(what) for what in world.wait(3)] == [JobEvicted]


def test_a_job_that_gives_up_lets_the_filler_stay(called):
    called.do(m.LeaseCancel(**called.who("a"), key="k"))
    assert called.wait(3) == []
    assert called.machine.state.jobs["f"].state is JobState.LIVE


@pytest.mark.parametrize("mode", ["sequential", "uncoordinated", "interleaved"])
def test_in_no_mode_a_job_shares_a_node_with_a_filler(mode):
    world = World(schedule=[{"mode": mode}])
    world.register("a")
    world.fill(num_nodes=2)
    world.ask("a", "rollout", 1, ["r0"])
    assert world.holders("r0") == ["f"]
    world.release("f")
    assert world.holders("r0") == ["a"]


def test_fillers_take_no_part_in_gates_barriers_and_turns():
    world = World(expect_jobs=1, schedule=[{"mode": "sequential", "steps": 1}, {"mode": "interleaved"}])
    world.fill(nodes={"train": ["train"]})
    assert not world.machine.state.started
    world.register("a")
    world.ask("a", "init", 0, ["r0"])
    world.release("a")
    assert not world.machine.state.started
    world.ask("a", "rollout", 1, ["r0"])
    assert world.machine.state.started
    world.release("f")
    world.release("a")
    world.ask("a", "rollout", 2, ["r0"])
    assert (world.machine.state.segment, world.holders("r0")) == (1, ["a"])
    assert queueing.turn(world.machine.state, world.machine.config).name == "a"


def test_a_waiting_filler_is_no_reason_to_end_a_silent_job(world):
    world.ask("a", "rollout", 1, ["r0", "r1"])
    world.fill()
    for _ in range(4):
        world.do(m.Heartbeat(**world.who("f"), beat=1))
        assert all(type(what) is JobSilent for what in world.wait(3))


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"num_nodes": 3}, "any 3 of 2 nodes"),
        ({"num_nodes": 0}, "any 0 of 2 nodes"),
        ({"num_nodes": 1, "step": 2}, "neither init nor steps"),
        ({"num_nodes": 1, "phase": "init"}, "neither init nor steps"),
    ],
)
def test_a_request_that_fits_no_filler_is_refused(asked, complaint):
    world = World()
    world.register("f", ROLLOUT, filler=True)
    (refused,) = world.ask_as_filler("f", key="k", nodes=["r0", "r1"], **asked)
    assert complaint in refused.reason


def test_a_job_gets_all_its_nodes_and_not_any_so_many(world):
    (refused,) = world.ask_as_filler("a", key="k", nodes=["r0", "r1"], num_nodes=1)
    assert "only a filler" in refused.reason


def test_a_filler_names_its_nodes():
    world = World()
    (refused,) = world.register("f", {"rollout": ["auto"], "train": ["auto"]}, filler=True)
    assert "must name pools or nodes" in refused.reason


def used(world, node="r0"):
    seen = describe(world.machine.state, world.machine.config, world.now, {})
    return seen["pools"]["rollout"]["nodes"][node]["usage"]


def test_seconds_of_jobs_and_fillers_count_from_the_first_lease_on_the_node():
    world = World()
    assert used(world) == {"seconds": 0.0, "jobs_s": 0.0, "fillers_s": 0.0, "bubble_filled": None}
    world.register("a", {"rollout": ["r0"], "train": ["t0"]})
    world.step("a", 10, 20, 1)
    world.fill(nodes={"rollout": ["r0"]})
    world.now += 10
    assert used(world)["fillers_s"] == 10.0, "a lease that is held counts too"
    world.release("f")
    found = used(world)
    assert (found["jobs_s"], found["fillers_s"]) == (10.0, 11.0)
    assert found["bubble_filled"] == pytest.approx(11.0 / (found["seconds"] - 10.0))


def test_nodes_that_go_back_before_the_rest_count_until_then(world):
    world.ask("a", "rollout", 1, ["r0", "r1"])
    world.now += 4
    world.do(m.LeaseShrink(**world.who("a"), key="s", token=1, nodes=["r0"]))
    world.now += 4
    world.release("a")
    assert (used(world, "r0")["jobs_s"], used(world, "r1")["jobs_s"]) == (5.0, 10.0)


JOBS, FILLERS = st.sampled_from("ab"), st.sampled_from("fg")


class Filled(RuleBasedStateMachine):
    """Jobs come and go as they like; fillers leave when the coordinator asks, or do not. Each event is a second after the one
    before."""

    @initialize(mode=st.sampled_from(["interleaved", "sequential", "uncoordinated"]))
    def begin(self, mode):
        self.world = World(lease_timeout=1000, schedule=[{"mode": mode}])
        self.mode, self.keys = mode, itertools.count()
        for job in "ab":
            self.world.register(job)

    @property
    def state(self):
        return self.world.machine.state

    def in_the_way(self, request):
        """Leases of fillers that are all that keeps this request from its nodes."""
        meets = [lease for lease in self.state.leases.values() if set(lease.nodes) & set(request.nodes)]
        return meets if all(self.state.jobs[lease.job].filler for lease in meets) else []

    @rule(job=JOBS, nodes=st.sampled_from([["r0"], ["r1"], ["r0", "r1"], ["t0"]]))
    def ask(self, job, nodes):
        step = max(1, self.state.jobs[job].asked)
        self.world.ask(job, "rollout", step, nodes, key=str(next(self.keys)))

    @precondition(lambda self: self.state.leases)
    @rule(data=st.data())
    def release(self, data):
        lease = data.draw(st.sampled_from(list(self.state.leases.values())))
        if self.state.jobs[lease.job].state is JobState.LIVE:
            self.world.release(lease.job, lease.token)

    @rule(job=JOBS)
    def give_up(self, job):
        for request in [request for request in self.state.requests if request.job == job]:
            self.world.do(m.LeaseCancel(**self.world.who(job), key=request.key))

    @rule(filler=FILLERS, num_nodes=st.integers(1, 2), pool=st.sampled_from(["rollout", "train"]))
    def fill(self, filler, num_nodes, pool):
        known = self.state.jobs.get(filler)
        if known is None or known.state is JobState.ENDED:
            self.world.register(filler, {pool: [pool]}, filler=True)
            known = self.state.jobs[filler]
        if known.state is JobState.LIVE and not self.state.leases_of(filler) and len(known.all_nodes) >= num_nodes:
            key = str(next(self.keys))
            self.world.ask_as_filler(filler, nodes=known.all_nodes, num_nodes=num_nodes, key=key)

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds):
        self.world.wait(seconds)
        for job in list(self.state.jobs.values()):
            if job.state is JobState.DYING:
                self.world.do(ProcessesGone(job=job.name, uid=job.uid))

    @invariant()
    def a_filler_shares_no_node(self):
        for first, second in itertools.combinations(self.state.leases.values(), 2):
            if self.state.jobs[first.job].filler or self.state.jobs[second.job].filler:
                assert not set(first.nodes) & set(second.nodes)

    @invariant()
    def whoever_is_in_a_jobs_way_is_called_back(self):
        for request in self.state.requests:
            if not request.is_fillers and not queueing.held_back(request, self.state, self.world.machine.config):
                for lease in self.in_the_way(request):
                    assert set(self.state.jobs[lease.job].contended) & set(lease.nodes)

    def teardown(self):
        """Fillers that never leave by themselves: after their grace, and the end of their processes, no job waits for one."""
        if not hasattr(self, "world"):
            return
        self.time_passes(int(FILLER_GRACE_S) + 1)
        for request in self.state.requests:
            held_back = queueing.held_back(request, self.state, self.world.machine.config)
            assert request.is_fillers or held_back or not self.in_the_way(request)


Filled.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40, suppress_health_check=list(HealthCheck), deadline=None
)
TestFilled = Filled.TestCase
