"""The invariants of verl_mux/coordinator/core/state.py hold under any history of events, legal or not."""

import itertools

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.coordinator.driver import SIDES, Driver, changed_pools, config
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core import records as r
from verl_mux.coordinator.core.records import JobState, State
from verl_mux.coordinator.core.state import IllegalMove, Machine, UnknownJob

SCHEDULES = [
    [{"mode": "interleaved"}],
    [{"mode": "sequential", "steps": 2}, {"mode": "uncoordinated", "steps": 2}, {"mode": "interleaved"}],
    [{"mode": "sequential"}],
]
JOBS = st.sampled_from("abc")
NODES = st.sampled_from(["r0", "r1", "t0"])
HOSTS = {name: m.HostName(name, [], "boot", "1") for name in ("hosta", "hostb")}
PLACES = {
    "rollout": {"nodes": [{"name": "r0", "host": "hosta"}, {"name": "r1", "host": "hostb"}]},
    "train": {"nodes": [{"name": "t0"}]},
}
NODE_SETS = st.sampled_from([["r0"], ["r0"], ["r1"], ["r0", "r1"], ["r1", "t0"], ["r0", "r1", "t0"]])


class AnyHistory(RuleBasedStateMachine):
    """Random events, legal or not; the invariants of verl_mux/coordinator/core/state.py hold after each."""

    @initialize(schedule=st.sampled_from(SCHEDULES), expect_jobs=st.integers(0, 2))
    def begin(self, schedule, expect_jobs):
        self.first_config = config(schedule=schedule, expect_jobs=expect_jobs, pools=PLACES)
        self.driver = Driver(Machine(self.first_config))
        self.keys = itertools.count()
        self.shared = set()  # tokens granted where nobody is excluded
        self.last_token = 0
        for job in "abc":
            self.driver.register(job)
        self.frozen = {}  # dying job -> the leases it died with

    @property
    def config(self):
        return self.driver.machine.config

    @property
    def state(self):
        return self.driver.machine.state

    def step(self, what):
        """Feeds one event; an illegal one must change nothing."""
        before = msgspec.msgpack.encode(self.state)
        held = dict(self.state.leases)
        waiting = {request.key: request for request in self.state.requests}
        try:
            self.driver.do(what)
        except (IllegalMove, UnknownJob):
            assert msgspec.msgpack.encode(self.state) == before
            return
        self.check_grants(held, waiting | {each.key: each for each in self.state.requests}, what)
        if isinstance(what, r.ProcessesGone):
            assert self.frozen.pop(what.job) == [lease for lease in held.values() if lease.job == what.job]  # 5
            assert not self.state.leases_of(what.job)

    def check_grants(self, held, waiting, what):
        mode = queueing.mode(self.state, self.config)
        for token in sorted(set(self.state.leases) - set(held)):
            lease = self.state.leases[token]
            assert token > self.last_token  # 3
            assert not set(lease.nodes) & {*self.state.fenced, *self.config.draining}  # 7
            self.last_token = token
            asked = waiting.get(lease.key, what)
            assert lease.nodes == asked.nodes  # 2
            if mode == "uncoordinated" and lease.step > 0:
                self.shared.add(token)
                continue
            for earlier in self.state.requests:  # 4: who was there first and still waits may not run, or elsewhere
                if asked is not what and earlier.asked_at < asked.asked_at and set(earlier.nodes) & set(lease.nodes):
                    assert queueing.held_back(earlier, self.state, self.config)

    @rule(job=JOBS, steps=st.sampled_from([None, 3]), uid=st.sampled_from("12"))
    def register(self, job, steps, uid):
        where = {"host": "here", "pid": 7, "started": 1, "steps": steps, "nodes": SIDES}
        self.step(m.Register(**self.driver.who(job, f"{job}:{uid}"), **where))

    @rule(job=JOBS, phase=st.sampled_from(["init", "rollout", "train"]), ahead=st.integers(0, 1), nodes=NODE_SETS)
    def ask(self, job, phase, ahead, nodes):
        known = self.state.jobs.get(job)
        step = 0 if phase == "init" else max(1, known.asked + ahead) if known else 1
        who = self.driver.who(job, known.uid if known else None)
        self.step(m.LeaseRequest(**who, key=str(next(self.keys)), phase=phase, step=step, nodes=nodes))

    @precondition(lambda self: self.state.leases)
    @rule(data=st.data())
    def release(self, data):
        lease = self.state.leases[data.draw(st.sampled_from(sorted(self.state.leases)))]
        self.step(m.LeaseRelease(**self.driver.who(lease.job, self.state.jobs[lease.job].uid), token=lease.token))

    @precondition(lambda self: self.state.leases)
    @rule(data=st.data(), nodes=NODE_SETS)
    def shrink(self, data, nodes):
        lease = self.state.leases[data.draw(st.sampled_from(sorted(self.state.leases)))]
        who = self.driver.who(lease.job, self.state.jobs[lease.job].uid)
        self.step(m.LeaseShrink(**who, key=str(next(self.keys)), token=lease.token, nodes=nodes))

    @precondition(lambda self: self.state.requests)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(self.state.requests))
        who = self.driver.who(request.job, self.state.jobs[request.job].uid)
        self.step(m.LeaseCancel(**who, key=request.key))

    @rule(job=JOBS, kind=st.sampled_from([m.Heartbeat, m.StepReport, m.Deregister]))
    def talk(self, job, kind):
        known = self.state.jobs.get(job)
        extra = {m.Heartbeat: {"beat": 1}, m.Deregister: {}}.get(kind)
        extra = {"step": max(1, known.asked if known else 1), "metrics": {}} if extra is None else extra
        self.step(kind(**self.driver.who(job, known.uid if known else None), **extra))

    @rule(job=JOBS, kind=st.sampled_from([r.JobSilent, r.DriverDied, r.JobExited, r.ProcessesGone, m.Failing]))
    def see(self, job, kind):
        known = self.state.jobs.get(job)
        before, leases = known.state if known else None, self.state.leases_of(job)
        uid = known.uid if known else None
        self.step(kind(**self.driver.who(job, uid), reason="failed") if kind is m.Failing else kind(job=job, uid=uid))
        if known and before is not known.state is JobState.DYING:
            self.frozen[job] = leases

    @rule(job=JOBS, node=NODES, owed=st.booleans())
    def look(self, job, node, owed):
        """Somebody found a node empty of a dying job, or cannot look."""
        known = self.state.jobs.get(job)
        seen = {"job": job, "uid": known.uid if known else None}
        host = {"r0": "hosta/1", "r1": "hostb/"}.get(node, "far/")
        was_dying = known is not None and known.state is JobState.DYING
        self.step(r.NodesOwed(**seen, host=host, nodes=[node]) if owed else r.NodeEmpty(**seen, node=node))
        if was_dying:
            assert not any(node in lease.nodes for lease in self.state.leases_of(job))
            self.frozen[job] = [
                msgspec.structs.replace(lease, nodes=[other for other in lease.nodes if other != node])
                for lease in self.frozen[job]
                if lease.nodes != [node]
            ]

    @rule(host=st.sampled_from(sorted(HOSTS)), boot=st.sampled_from(["boot", "boot", "next"]))
    def agent_speaks(self, host, boot):
        self.step(r.HostSeen(host=msgspec.structs.replace(HOSTS[host], boot=boot)))

    @rule(
        host=st.sampled_from(["hosta/1", "hostb/1", "hostb/", "far/"]),
        kind=st.sampled_from([r.HostGone, r.HostReleased, r.OwedPaid]),
        uid=st.sampled_from(["a:1", "b:1"]),
    )
    def host_changes(self, host, kind, uid):
        if kind is r.HostGone and not (host in self.state.hosts and self.state.hosts[host].agent):
            return
        self.step(r.OwedPaid(host=host, uid=uid) if kind is r.OwedPaid else kind(host=host))

    @rule(node=NODES, undo=st.booleans())
    def drain_node(self, node, undo):
        self.reload(**{"undrain" if undo else "drain": [node]})

    def reload(self, **changes):
        self.step(r.PoolsChanged(pools=changed_pools(self.driver.machine.config.pools, **changes)))

    @rule()
    def restart(self):
        """The state read back from its encoding, and the one replayed from all events, equal the live one."""
        again = Machine(self.first_config)
        for event in self.driver.events:
            again.handle(event)
        assert again.state == self.state == msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=State)
        heard = self.driver.machine.heard
        self.driver.machine = again
        assert again.heard == heard

    @invariant()
    def no_node_has_two_holders_where_jobs_exclude_each_other(self):
        for first, second in itertools.combinations(sorted(self.state.leases.values(), key=lambda x: x.token), 2):
            assert second.token in self.shared or not set(first.nodes) & set(second.nodes)  # 1

    @invariant()
    def a_dying_job_keeps_what_it_held(self):
        for job, leases in self.frozen.items():
            assert self.state.leases_of(job) == leases  # 5

    @invariant()
    def what_is_owed_is_fenced(self):
        for host in self.state.hosts.values():
            assert {node for owed in host.owed for node in owed.nodes} <= set(self.state.fenced)

    @invariant()
    def nobody_waits_who_could_run(self):
        assert queueing.grantable(self.state, self.config) == []

    def teardown(self):
        """6: when holders release, only those held back remain; when all but one job leave, that one gets its turn."""
        if not hasattr(self, "driver"):
            return
        for host in list(self.state.hosts):
            self.step(r.HostReleased(host=host))
        self.reload(undrain=["r0", "r1", "t0"])
        assert not self.state.fenced
        self.drain()
        assert all(queueing.held_back(request, self.state, self.config) for request in self.state.requests)
        while self.state.requests and self.state.started:
            keep = self.state.requests[0].job
            for job in [job for job in self.state.jobs.values() if job.name != keep and job.state is JobState.LIVE]:
                self.step(m.Deregister(**self.driver.who(job.name, job.uid)))
            self.drain()
            assert not self.state.requests

    def drain(self):
        for job in list(self.state.jobs.values()):
            if job.state is JobState.DYING:
                self.step(r.ProcessesGone(job=job.name, uid=job.uid))
            elif job.state is JobState.SILENT:
                self.step(m.Heartbeat(**self.driver.who(job.name, job.uid), beat=1))
        while self.state.leases:
            lease = next(iter(self.state.leases.values()))
            self.step(m.LeaseRelease(**self.driver.who(lease.job, self.state.jobs[lease.job].uid), token=lease.token))


AnyHistory.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=50, suppress_health_check=list(HealthCheck)
)
TestAnyHistory = AnyHistory.TestCase
