"""The index finds what its definition, over all records, finds; and it costs what changes, not what there is."""

import functools
import itertools

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.coordinator.driver import Driver, config
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import queueing, telemetry
from verl_mux.coordinator.core.fillers import granting
from verl_mux.coordinator.core.inputs_and_instructions import (
    DriverDied,
    HostGone,
    HostSeen,
    Input,
    JobExited,
    JobSilent,
    Log,
    NodeDrained,
    NodeEmpty,
    NodesOwed,
    OwedPaid,
    ProcessesGone,
    Send,
    Settled,
)
from verl_mux.coordinator.core.job_states import IllegalMove, UnknownJob
from verl_mux.coordinator.core.people import precedence
from verl_mux.coordinator.core.records import JobState
from verl_mux.coordinator.core.state import Machine
from verl_mux.profiling.eventlog import events

NODES = ["r0", "r1", "t0"]
SIDES = [{"rollout": ["r0", "r1"], "train": ["t0"]}, {"rollout": ["r0"], "train": ["t0"]}, {"rollout": ["r1"], "train": ["r1"]}]
SCHEDULES = [
    [{"mode": "interleaved"}],
    [{"mode": "interleaved", "steps": 1}, {"mode": "interleaved"}],
    [{"mode": "sequential", "steps": 2}, {"mode": "uncoordinated", "steps": 2}, {"mode": "interleaved"}],
]
JOBS = st.sampled_from("abcd")
FILLERS = "ef"
PLACES = {
    "rollout": {"nodes": [{"name": "r0", "host": "hosta", "usd_per_hour": 90.0}, {"name": "r1", "usd_per_hour": 90.0}]},
    "train": {"nodes": [{"name": "t0", "usd_per_hour": 90.0}]},
}


class Defined(Machine):
    """Finds who may go, and who is to be told, by looking at everything after every input."""

    def _settle(self, now):
        out = []
        precedence.update(self.state, self.config, now)
        if queueing.advance(self.state, self.config):
            out.append(Log(events.SEGMENT, {"index": self.state.segment, "mode": queueing.mode(self.state, self.config)}))
            for node in self.state.peaks:
                telemetry.count_peak(self.state, node)
        for request in queueing.grantable(self.state, self.config):
            out += self._leases.give(request, request.nodes, now)
        is_open = functools.partial(granting.is_open, state=self.state)
        fillers = [request for request in self.state.requests if request.is_fillers]
        for request, nodes in granting.grantable(fillers, self.state, is_open, now):
            out += self._leases.give(request, nodes, now)
        for job in sorted(self.state.jobs.values(), key=lambda job: job.order):
            nodes, gangs = (found(job, self.state, self.config) for found in (queueing.contended, queueing.gangs))
            if job.state is JobState.LIVE and (nodes, gangs) != (job.contended, job.gangs):
                job.contended, job.gangs = nodes, gangs
                self._call(now, job)
                out += [Send(client, m.Contended(nodes=nodes, gangs=gangs)) for client in job.clients]
        return out


class Indexed(RuleBasedStateMachine):
    """Both machines take the same inputs, legal or not."""

    @initialize(schedule=st.sampled_from(SCHEDULES), expect_jobs=st.integers(0, 2), shares=st.sampled_from([{}, {"a": 3.0}]))
    def begin(self, schedule, expect_jobs, shares):
        settings = config(schedule=schedule, expect_jobs=expect_jobs, pools=PLACES, shares=shares)
        self.machines = Machine(settings), Defined(settings)
        self.now, self.keys = 0.0, itertools.count()

    @property
    def state(self):
        return self.machines[0].state

    def who(self, job, client=1):
        known = self.state.jobs.get(job)
        return {"job": job, "uid": known.uid if known else f"{job}:1", "client": f"{job}-{client}"}

    def give(self, what):
        self.now += 1.0
        found, defined = (self.answer(machine, Input(self.now, what)) for machine in self.machines)
        assert found == defined
        assert msgspec.msgpack.encode(self.state) == msgspec.msgpack.encode(self.machines[1].state)
        self.compare_look_ups()

    def answer(self, machine, given):
        try:
            return sorted(machine.handle(given), key=lambda step: isinstance(getattr(step, "message", None), m.Contended))
        except (IllegalMove, UnknownJob) as error:
            return str(error)

    def compare_look_ups(self):
        waiting = self.machines[0]._waiting
        waiting.follow(self.state)
        for node in NODES:
            assert waiting.is_open(node) == granting.is_open(node, self.state)
        for job in "abcdef":
            assert waiting.leases_of(job) == self.state.leases_of(job)
            assert waiting.requests_of(job) == [request for request in self.state.requests if request.job == job]
            for client in (f"{job}-1", f"{job}-2"):
                assert waiting.queued_by(client) == [request.key for request in self.state.requests if request.client == client]

    @rule(job=JOBS, sides=st.sampled_from(SIDES), client=st.sampled_from([1, 2]), uid=st.sampled_from("112"), again=st.booleans(),
          token=st.integers(1, 9))  # fmt: skip
    def register(self, job, sides, client, uid, again, token):
        where = {"host": "here", "pid": 7, "started": 1, "nodes": sides, "again": again, "owner": min(job, "b")}
        where |= {"priority": ord(job) % 3, "budget_usd": 0.1 if job == "d" else None}
        claim = m.Claim(token=token, key=f"c{token}", phase="rollout", step=1, nodes=["r0"], granted_at=1.0)
        who = {"job": job, "uid": f"{job}:{uid}", "client": f"{job}-{client}"}
        self.give(m.Register(**who, **where, held=[claim] if again else []))

    @rule(job=JOBS, phase=st.sampled_from(["init", "rollout", "rollout", "train"]), ahead=st.integers(0, 1),
          nodes=st.lists(st.sampled_from(NODES), min_size=1, max_size=3), client=st.sampled_from([1, 1, 2]))  # fmt: skip
    def ask(self, job, phase, ahead, nodes, client):
        known = self.state.jobs.get(job)
        step = 0 if phase == "init" else max(1, known.asked + ahead) if known else 1
        self.give(m.LeaseRequest(**self.who(job, client), key=str(next(self.keys)), phase=phase, step=step, nodes=nodes))

    @rule(job=st.sampled_from(FILLERS), sides=st.sampled_from(SIDES), uid=st.sampled_from("112"))
    def register_filler(self, job, sides, uid):
        where = {"host": "here", "pid": 7, "started": 1, "nodes": sides, "filler": True}
        self.give(m.Register(job=job, uid=f"{job}:{uid}", client=f"{job}-1", **where))

    @rule(job=st.sampled_from(FILLERS), nodes=st.lists(st.sampled_from(NODES), min_size=1, max_size=3, unique=True),
          data=st.data(), least=st.sampled_from([0.0, 0.0, 3.0]))  # fmt: skip
    def ask_as_filler(self, job, nodes, data, least):
        asked = {"num_nodes": data.draw(st.integers(1, len(nodes))), "least": least, "phase": "train", "step": 0, "nodes": nodes}
        self.give(m.LeaseRequest(**self.who(job), key=str(next(self.keys)), **asked))

    @precondition(lambda self: self.state.leases)
    @rule(data=st.data(), some=st.lists(st.sampled_from(NODES), max_size=2))
    def give_back(self, data, some):
        lease = data.draw(st.sampled_from(list(self.state.leases.values())))
        who = self.who(lease.job)
        kinds = [m.LeaseRelease(**who, token=lease.token), m.LeaseShrink(**who, key="s", token=lease.token, nodes=some)]
        self.give(data.draw(st.sampled_from(kinds)))

    @precondition(lambda self: self.state.requests)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(self.state.requests))
        self.give(m.LeaseCancel(**self.who(request.job), key=request.key))

    @rule(
        job=st.sampled_from("abcdef"),
        client=st.sampled_from([1, 2]),
        kind=st.sampled_from([m.Heartbeat, m.StepReport, m.Detach, m.Deregister]),
    )
    def talk(self, job, client, kind):
        extra = {m.Heartbeat: {"beat": 1}, m.StepReport: {"step": 1, "metrics": {}}}.get(kind, {})
        self.give(kind(**self.who(job, client), **extra))

    @rule(job=st.sampled_from("abcdef"),
          kind=st.sampled_from([JobSilent, JobSilent, DriverDied, JobExited, ProcessesGone, m.Failing]))  # fmt: skip
    def see(self, job, kind):
        known = self.state.jobs.get(job)
        seen = {"job": job, "uid": known.uid if known else None}
        self.give(m.Failing(**self.who(job), reason="failed") if kind is m.Failing else kind(**seen))

    @rule(job=JOBS, node=st.sampled_from(NODES), owed=st.booleans())
    def look(self, job, node, owed):
        known = self.state.jobs.get(job)
        seen = {"job": job, "uid": known.uid if known else None}
        self.give(NodesOwed(**seen, host="far/", nodes=[node]) if owed else NodeEmpty(**seen, node=node))

    @rule(what=st.sampled_from([*(NodeDrained(node=node, undo=undo) for node in NODES for undo in (False, True)),
                                HostSeen(host=m.HostName("hosta", [], "boot", "1")), HostGone(host="hosta/1"),
                                *(OwedPaid(host="far/", uid=f"{job}:1") for job in "abcd")]))  # fmt: skip
    def fence(self, what):
        self.give(what)

    @rule()
    def settled(self):
        self.give(Settled())

    @rule()
    def records_replaced(self):
        """As after a restart, or a fault that was taken back."""
        machine = self.machines[0]
        machine.state = msgspec.msgpack.decode(msgspec.msgpack.encode(machine.state), type=type(machine.state))


Indexed.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=50, suppress_health_check=list(HealthCheck), deadline=None
)
TestIndexed = Indexed.TestCase


def test_jobs_are_told_of_contention_in_order_of_registration_not_of_first_mention():
    told = []
    for machine in (Machine(config()), Defined(config())):
        driver = Driver(machine)
        driver.do(JobExited(job="b"))
        for job in "abc":
            driver.register(job)
        driver.ask("a", "rollout", 1, ["r0"])
        driver.sent.clear()
        driver.ask("c", "rollout", 1, ["r0"])
        told.append([sent.client for sent in driver.sent])
    assert told == [["a-client", "b-client"]] * 2


@pytest.mark.parametrize("jobs", [10, 200])
def test_a_heartbeat_looks_at_no_other_job(jobs, monkeypatch):
    driver = Driver(Machine(config()))
    for number in range(jobs):
        driver.register(f"j{number}")
        driver.ask(f"j{number}", "rollout", 1, ["r0"])
    monkeypatch.setattr(queueing, "held_back", None)
    monkeypatch.setattr(driver.machine, "_settle", None)
    (ack,) = driver.do(m.Heartbeat(**driver.who("j3"), beat=1))
    assert ack.queued == ["j3.rollout.1"]


def test_a_request_behind_others_asks_who_is_held_back_a_few_times_only(monkeypatch):
    driver = Driver(Machine(config()))
    for number in range(200):
        driver.register(f"j{number}")
        driver.ask(f"j{number}", "rollout", 1, ["r0"])
    asked, held_back = [], queueing.held_back
    monkeypatch.setattr(queueing, "held_back", lambda *given: asked.append(given) or held_back(*given))
    driver.release("j0")
    assert driver.holders("r0") == ["j1"] and len(asked) < 10
