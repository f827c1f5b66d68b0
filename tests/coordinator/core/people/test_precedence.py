"""Shares, priorities and deadlines: what each job's turn at a node comes to over time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordinator.driver import Driver, config
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.people import precedence
from verl_mux.coordinator.core.placement import placing
from verl_mux.coordinator.core.state import Machine
from verl_mux.errors import UserError

POOLS = {"gpus": {"nodes": [{"name": "n0"}, {"name": "n1"}]}}
BOTH = {"rollout": ["n0", "n1"], "train": ["n0", "n1"]}


def driven(**keys):
    return Driver(Machine(config(**{"pools": POOLS, "lease_timeout": 1e6, "hung_least": 1e6, **keys})))


def come(driver, name, **keys):
    driver.register(name, nodes=BOTH, **keys)


class Crowd:
    """Jobs that always want one node each, or both; `given` seconds of a node by owner."""

    def __init__(self, driver, jobs, seconds):
        self.driver, self.jobs, self.seconds = driver, jobs, seconds
        self.given = dict.fromkeys((keys["owner"] for keys in jobs.values()), 0.0)
        self.ends, self.number, self.waited = {}, 0, {}
        for name, keys in jobs.items():
            come(driver, name, owner=keys["owner"], priority=keys.get("priority", 0))
            self.ask(name)

    def ask(self, name):
        self.number += 1
        nodes = self.jobs[name].get("nodes", ["n0"])
        self.waited[name] = self.driver.now
        what = m.LeaseRequest(**self.driver.who(name), key=str(self.number), phase="train", step=1, nodes=nodes)
        self.driver.do(what, after=0.001)
        self.look()

    def look(self):
        for lease in self.driver.machine.state.leases.values():
            if lease.token not in self.ends:
                self.ends[lease.token] = lease.granted_at + self.seconds(lease.job)
                self.waited[lease.job] = None

    def run(self, hours):
        until = self.driver.now + hours * 3600
        while self.driver.now < until:
            token = min(self.ends, key=self.ends.get)
            lease = self.driver.machine.state.leases[token]
            self.driver.now = max(self.driver.now, self.ends.pop(token))
            self.given[self.jobs[lease.job]["owner"]] += len(lease.nodes) * (self.driver.now - lease.granted_at)
            self.driver.do(m.LeaseRelease(**self.driver.who(lease.job), token=token), after=0.001)
            self.look()
            self.ask(lease.job)
        return {owner: seconds / sum(self.given.values()) for owner, seconds in self.given.items()}


def test_owners_get_their_shares_however_many_jobs_they_bring():
    driver = driven(shares={"ann": 2, "bob": 1})
    jobs = {"a": {"owner": "ann"}, **{f"b{i}": {"owner": "bob"} for i in range(5)}, "a2": {"owner": "ann"}}
    found = Crowd(driver, jobs, lambda job: 60.0).run(hours=20)
    assert found["ann"] == pytest.approx(2 / 3, abs=0.02)


def test_without_shares_jobs_queue_as_they_come():
    jobs = {"a": {"owner": "ann"}, **{f"b{i}": {"owner": "bob"} for i in range(4)}}
    driver = driven()
    found = Crowd(driver, jobs, lambda job: 60.0).run(hours=5)
    assert found["ann"] == pytest.approx(1 / 5, abs=0.02) and driver.machine.state.precedence == {}


WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 4.0])


@settings(max_examples=examples(15), deadline=None)
@given(
    shares=st.fixed_dictionaries(dict.fromkeys(("ann", "bob", "eve"), WEIGHTS)),
    counts=st.fixed_dictionaries({owner: st.integers(2, 4) for owner in ("ann", "bob", "eve")}),
    seed=st.integers(0, 99),
    wide=st.booleans(),
)
def test_whoever_always_waits_gets_within_a_tenth_of_his_share_and_no_node_is_left_idle(shares, counts, seed, wide):
    drawn = random.Random(seed)
    nodes = [["n0"], ["n0", "n1"]] if wide else [["n0"]]
    jobs = {
        f"{owner}{i}": {"owner": owner, "nodes": nodes[i % len(nodes)]} for owner, count in counts.items() for i in range(count)
    }
    driver = driven(shares=shares)
    crowd = Crowd(driver, jobs, lambda job: drawn.uniform(20.0, 120.0))
    found = crowd.run(hours=12)
    for owner, share in shares.items():
        assert found[owner] == pytest.approx(share / sum(shares.values()), abs=0.1)
    assert driver.holders("n0"), "somebody waits for it, so somebody has it"
    assert all(since is None or driver.now - since < 6 * 3600 for since in crowd.waited.values()), "nobody starves"


def test_a_share_that_nobody_uses_goes_to_the_others():
    driver = driven(shares={"ann": 100, "bob": 1})
    crowd = Crowd(driver, {"b1": {"owner": "bob"}, "b2": {"owner": "bob"}}, lambda job: 60.0)
    crowd.run(hours=1)
    assert crowd.given["bob"] == pytest.approx(3600, rel=0.05)


def test_who_was_away_has_saved_up_little():
    """After a day alone bob's hours count for half after each hour: ann catches up for hours, not for a day."""
    driver = driven(shares={"ann": 1, "bob": 1}, share_half_life=3600)
    crowd = Crowd(driver, {"b1": {"owner": "bob"}, "b2": {"owner": "bob"}}, lambda job: 60.0)
    crowd.run(hours=24)
    jobs = {**crowd.jobs, "a1": {"owner": "ann"}, "a2": {"owner": "ann"}}
    crowd.jobs, crowd.given = jobs, {"ann": 0.0, "bob": 0.0}
    for name in ("a1", "a2"):
        come(driver, name, owner="ann")
        crowd.ask(name)
    assert crowd.run(hours=12)["bob"] > 0.4


def first_on(driver, *names, node="n0"):
    """Who gets the node when all of them ask while another one holds it."""
    come(driver, "holder")
    driver.ask("holder", "train", 1, [node])
    for name in names:
        driver.ask(name, "train", 1, [node])
    driver.release("holder")
    return driver.holders(node)


def test_of_one_owner_the_higher_priority_goes_first_and_equals_as_they_came():
    driver = driven()
    for name, priority in (("low", -1), ("one", 5), ("two", 5)):
        come(driver, name, owner="ann", priority=priority)
    assert first_on(driver, "low", "one", "two") == ["one"]
    driver.release("one")
    assert driver.holders("n0") == ["two"]


def test_an_owners_share_comes_before_his_priorities():
    driver = driven(shares={"ann": 1, "bob": 1})
    come(driver, "a", owner="ann")
    come(driver, "b", owner="bob", priority=10)
    driver.ask("b", "train", 1, ["n1"])
    driver.now += 100
    driver.release("b")
    assert first_on(driver, "b", "a") == ["a"]


def test_a_gang_that_goes_first_gets_its_nodes_before_smaller_requests():
    driver = driven()
    come(driver, "small")
    come(driver, "wide", priority=1)
    come(driver, "holder")
    driver.ask("holder", "train", 1, ["n1"])
    driver.ask("wide", "train", 1, ["n0", "n1"])
    driver.ask("small", "train", 1, ["n0"])
    assert driver.holders("n0") == []
    driver.release("holder")
    assert driver.holders("n0") == ["wide"]


def test_the_nearer_the_deadline_the_sooner_its_turn():
    driver = driven()
    come(driver, "other", priority=2)
    come(driver, "late", deadline_s=8000.0)
    assert first_on(driver, "late", "other") == ["other"]
    driver.release("other")
    driver.release("late")
    driver.now += 7000
    driver.do(m.Deregister(**driver.who("holder")))
    driver.ask("other", "train", 2, ["n0"])
    driver.ask("late", "train", 2, ["n0"])
    other, late = (driver.machine.state.jobs[name] for name in ("other", "late"))
    assert precedence.urgency(late, driver.now, driver.now) == 3 > precedence.urgency(other, driver.now, driver.now)


def test_steps_that_are_yet_to_do_leave_a_deadline_less_time():
    driver = driven()
    come(driver, "a", deadline_s=1000.0, steps=10)
    driver.ask("a", "train", 1, ["n0"])
    driver.now += 100
    driver.release("a")
    job = driver.machine.state.jobs["a"]
    assert precedence.urgency(job, driver.now, driver.now) == 8, "ten steps of a hundred seconds do not fit any more"
    job.steps = 2
    assert precedence.urgency(job, driver.now, driver.now) == 0


def test_who_is_passed_for_long_goes_first():
    driver = driven()
    come(driver, "low", priority=-1)
    come(driver, "high", priority=1)
    low, high = (driver.machine.state.jobs[name] for name in ("low", "high"))
    now = driver.now + 3 * precedence.AGEING_S
    assert precedence.urgency(low, driver.now, now) > precedence.urgency(high, now, now)


def test_who_waits_to_be_placed_goes_by_urgency_within_what_owners_hold():
    from tests.coordinator.core.placement.placed_jobs import arrive, placing_config

    driver = Driver(Machine(placing_config()))
    arrive(driver, "a", slo=1.0)
    for name, priority in (("low", 0), ("high", 4)):
        assert isinstance(arrive(driver, name, slo=1.0, priority=priority)[0], m.Queued)
    driver.do(m.Deregister(**driver.who("a")))
    assert driver.machine.state.jobs["high"].nodes and not driver.machine.state.jobs["low"].nodes
    assert placing.asked(driver.machine.state, driver.machine.config, driver.now) is None


@pytest.mark.parametrize("share", [0, -1, float("inf")])
def test_shares_that_are_none_are_refused(share):
    with pytest.raises(UserError, match="shares of 'ann' are .*; a number above 0 is needed"):
        driven(shares={"ann": share})
