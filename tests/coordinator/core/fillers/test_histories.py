"""Whatever happens, no job waits for a filler longer than its grace and its end take, and no node has two holders."""

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.coordinator.core.fillers.test_granting import World
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.inputs_and_instructions import ProcessesGone
from verl_mux.coordinator.core.records import JobState
from verl_mux.coordinator.core.settings import FILLER_GRACE_S

JOBS, FILLERS = st.sampled_from("ab"), st.sampled_from("fg")


class Filled(RuleBasedStateMachine):
    """Jobs come and go as they like; fillers leave when they are told, or do not. Each event is a second after the one before."""

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
