"""Reports of agents: what follows from each, what it is answered, and what an old one says nothing about."""

import pytest

from tests.coordinator.driver import Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.messages import Holder, Look
from verl_mux.coordinator.core import records as r
from verl_mux.coordinator.core.reaping import CALM_S, DYING_S, Sight, Sights, judge
from verl_mux.coordinator.core.state import Machine

POOLS = {
    "rollout": {"nodes": [{"name": "r0", "host": "hosta"}, {"name": "r1", "host": "10.0.0.2", "gpu_ids": [1], "gpus": 1}]},
    "train": {"nodes": [{"name": "t0"}]},
}
WORKER = m.Member("hostb", 9, 9, "boot", "1")


class World(Driver):
    """The driver of each job runs on host `here`, which is the coordinator's."""

    def __init__(self, **keys):
        super().__init__(Machine(config(pools=POOLS, **keys)))
        self.sights, self.number, self.answer = Sights(), 0, None

    def report(self, name="hostb", boot="boot", space="1", agent="g", **keys):
        """An agent speaks, and looks for what it was asked for before unless `looks` are given."""
        self.number += 1
        asked = self.answer.look_for if self.answer else {}
        keys = {"looks": [Look(uid, []) for uid in asked], **keys}
        host = m.HostName(name, ["10.0.0.2"] if name == "hostb" else [], boot, space)
        report = m.AgentReport(agent=agent, number=self.number, host=host, source="ledger", **keys)
        self.refused = self.sights.refusal(report, self.machine.state)
        seen = self.sights.take(report, self.machine.state, self.now)
        for what in seen:
            self.do(what, after=0.0)
        self.answer = self.sights.answer(report, self.machine.state, self.machine.config, "e", [])
        return seen

    def silence(self, seconds):
        """Time passes in which no agent speaks."""
        seen = []
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            for what in self.sights.due(self.machine.state, self.machine.config, self.now):
                seen.append(what)
                self.do(what, after=0.0)
        return seen

    def verdict(self, job="a", own=()):
        record = self.machine.state.jobs[job]
        sights = [Sight("", ["here"], "", {record.uid: [*own]}), *self.sights.on(self.machine.state)]
        return judge(record, sights, self.machine.state, self.machine.config, self.now)

    def evict(self, job="a"):
        self.do(r.JobEvicted(job=job, uid=f"{job}:1", reason="evicted"))

    @property
    def fenced(self):
        return self.machine.state.fenced


@pytest.fixture
def world():
    world = World()
    world.register("a")
    world.ask("a", "rollout", 1, ["r1"])
    world.silence(0.5)
    return world


def test_the_first_report_makes_a_host_known_by_its_name_and_addresses(world):
    assert [type(what) for what in world.report()] == [r.HostSeen]
    assert world.report() == []
    assert world.answer.nodes["r1"].job == "a" and world.answer.nodes["r1"].gpu_ids == [1]
    assert list(world.answer.nodes) == ["r1"], "known by its address"
    assert world.answer.again_s == CALM_S


def test_a_look_from_before_the_death_frees_nothing(world):
    world.report()
    world.report()
    world.evict()
    assert world.verdict().free == [] and world.verdict().waits_for == ["host hostb (not looked at yet)"]
    world.report(looks=[])
    assert world.answer.look_for.keys() == {"a:1"} and world.answer.again_s == DYING_S
    assert world.verdict().free == []
    world.report()
    assert world.verdict().free == ["r1"]


def test_a_doubled_or_late_report_is_not_taken(world):
    world.report()
    world.evict()
    world.report()
    world.report(looks=[Look("a:1", [WORKER])])
    world.number -= 2
    assert world.report(looks=[Look("a:1", [])]) == []
    assert world.verdict().free == [] and world.verdict().waits_for == ["pid 9 on hostb"]


def test_a_host_not_heard_for_a_lease_is_fenced_and_comes_back_with_its_agent(world):
    world.report()
    world.release("a")
    assert world.silence(4.5) == []
    assert world.silence(1.5) == [r.HostGone(host="hostb/1")]
    assert world.fenced == {"r1": "the agent of host hostb is not heard"}
    world.ask("a", "rollout", 2, ["r1"])
    assert world.holders("r1") == []
    world.report()
    assert world.fenced == {} and world.holders("r1") == ["a"]


def test_a_pause_of_the_coordinator_loses_no_agent(world):
    world.report()
    world.silence(1)
    world.now += 3600
    assert world.silence(2) == []


def test_what_a_dead_job_left_on_a_lost_host_is_owed_until_the_agent_saw_it_gone(world):
    world.report()
    world.silence(6)
    world.evict()
    world.now += 6
    (owed,) = world.verdict().owed.items()
    assert owed == ("hostb/1", ["r1"]) and world.verdict().gone
    world.do(r.NodesOwed(job="a", uid="a:1", host="hostb/1", nodes=["r1"]))
    world.do(r.ProcessesGone(job="a", uid="a:1"))
    world.register("a", uid="a:2")
    assert "job 'a' may be left there" in world.fenced["r1"]
    world.report(looks=[])
    assert world.fenced == {"r1": "something of job 'a' may be left on host hostb"}
    assert world.answer.end == ["a:1"]
    assert world.report(looks=[Look("a:1", [WORKER])]) == [] and world.fenced
    assert world.report() == [r.OwedPaid(host="hostb/1", uid="a:1")] and not world.fenced


def test_a_boot_leaves_nothing_of_what_ran_before(world):
    world.report()
    world.silence(6)
    world.evict()
    world.do(r.NodesOwed(job="a", uid="a:1", host="hostb/1", nodes=["r1"]))
    world.report(boot="next", looks=[])
    assert world.fenced == {}


def test_a_second_machine_of_the_same_name_is_refused_while_the_first_is_heard(world):
    world.report()
    world.report(boot="another")
    assert "names of hosts must differ" in world.refused


def test_a_host_without_an_agent_is_looked_at_by_the_first_that_comes(world):
    world.evict()
    world.do(r.NodesOwed(job="a", uid="a:1", host="10.0.0.2/", nodes=["r1"]))
    assert "where no agent looks" in world.fenced["r1"]
    world.report()
    assert world.fenced and world.answer.look_for.keys() == {"a:1"}
    world.report()
    assert not world.fenced


def test_what_is_owed_where_no_agent_looks_is_given_up_after_the_remote_grace():
    world = World(remote_grace=30)
    world.register("a")
    world.ask("a", "rollout", 1, ["r1"])
    world.evict()
    world.do(r.NodesOwed(job="a", uid="a:1", host="10.0.0.2/", nodes=["r1"]))
    assert world.silence(29) == []
    assert world.silence(2) == [r.OwedPaid(host="10.0.0.2/", uid="a:1")] and not world.fenced


def test_an_agent_that_is_gone_for_good_is_forgotten_by_hand(world):
    world.report()
    world.release("a")
    world.silence(6)
    world.do(r.HostReleased(host="hostb/1"))
    assert world.fenced == {} and world.machine.state.hosts == {}
    assert world.silence(10) == []


def test_a_dead_driver_is_told_by_the_agent_of_its_host():
    world = World()
    there = {"host": "hostb", "pid": 9, "started": 9, "boot": "boot", "space": "1"}
    world.do(m.Register(**world.who("a"), nodes={"rollout": ["r0"]}, **there))
    world.report()
    assert world.answer.drivers == [WORKER]
    assert world.report(dead=[WORKER]) == [r.DriverDied(job="a", uid="a:1")]
    assert world.machine.state.jobs["a"].reason == "its driver process died"


def test_jobs_are_named_to_an_agent_only_as_far_as_it_has_seen_them(world):
    world.report()
    assert world.answer.jobs == {}
    world.report(holders=[Holder("a:1", WORKER, {"r1": 5})])
    assert world.answer.jobs == {"a:1": "a"}
    assert world.sights.about(world.machine.state, world.now)["hostb"]["device_bytes"] == 5
    assert world.sights.carrying("a:1") == ["hostb"]


def test_of_a_job_told_to_have_exited_nothing_is_looked_for_that_ended(world):
    world.report()
    world.do(r.JobExited(job="a", uid="a:1"))
    world.do(r.ProcessesGone(job="a", uid="a:1"))
    world.report()
    assert world.answer.look_for == {}


def test_of_more_dying_jobs_than_a_report_can_name_those_are_looked_for_that_hold_nodes(world):
    world.report()
    for number in range(1100):
        where = {"host": "unseen", "pid": 7, "started": 1, "nodes": {"rollout": ["r0"]}}
        world.do(m.Register(**world.who(f"x{number}"), **where), after=0.0)
        world.evict(f"x{number}")
    world.evict("a")
    world.report()
    assert "a:1" in world.answer.look_for and len(world.answer.look_for) <= 1024
    world.report()
    assert world.refused is None and world.verdict().free == ["r1"]
    looks = [Look(uid, []) for uid in world.answer.look_for]
    report = m.AgentReport(agent="g", number=9, host=m.HostName("h", [], "b", "1"), source="ledger", looks=looks)
    assert m.decode(m.encode(report)) == report


def test_added_nodes_are_there_at_once_and_removed_ones_are_not(world):
    pools = config(pools={**POOLS, "more": {"nodes": [{"name": "m0", "host": "hostb", "gpu_ids": [2], "gpus": 1}]}}).pools
    world.do(r.PoolsChanged(pools=pools))
    world.report()
    assert set(world.answer.nodes) == {"r1", "m0"}
    world.register("b", nodes={"rollout": ["m0"]})
    world.ask("b", "rollout", 1, ["m0"])
    assert world.holders("m0") == ["b"]
