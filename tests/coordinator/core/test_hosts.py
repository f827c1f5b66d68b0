"""Host memory: which job fits beside which; and which changes of the configuration jobs on record can live with."""

import os
import random

import msgspec
import pytest

from tests.coordinator.driver import POOLS as DRIVER_POOLS
from tests.coordinator.driver import Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.messages import Holder
from verl_mux.coordinator.core import hosts
from verl_mux.coordinator.core.reaping import Sights
from verl_mux.coordinator.core.records import DriverDied, HostMeasured, HostRoom, HostSeen, ProcessesGone, State
from verl_mux.coordinator.core.snapshot import describe
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.prometheus import coordinator_samples

GB = 10**9
POOLS = {
    "rollout": {"kind": "H20", "nodes": [{"name": "r0", "host": "hosta", "gpus": 8, "host_bytes": 300 * GB}]},
    "train": {"nodes": [{"name": name, "host": "hostb", "gpus": 8, "gpu_ids": list(range(8 * at, 8 * at + 8)),
                         "host_bytes": 1000 * GB} for at, name in enumerate(("t0", "t1"))]},
    "elsewhere": {"nodes": [{"name": "u0", "gpus": 8}]},
}  # fmt: skip
T0 = {"train": ["t0"]}
BIG = {"train": {"parameters": 150 * GB, "optimizer": 300 * GB}}  # and 8 processes of 14 GB


@pytest.fixture
def driver():
    return Driver(Machine(config(pools=POOLS)))


def join(driver, job, nodes=T0, needs=BIG, gpus=8, **keys):
    """The first answer."""
    return driver.register(job, nodes, gpus=dict.fromkeys(nodes, gpus), host_memory=needs, **keys)[0]


def measure(driver, job, num_gb, node="t0"):
    """As the agent of the node's host would."""
    driver.do(HostMeasured(job=job, uid=f"{job}:1", node=node, bytes={"private": round(num_gb * GB)}))


def finish(driver, job, step):
    driver.do(m.StepReport(**driver.who(job), step=step, metrics={}))


def counted(driver, job, node="t0"):
    return hosts.counted(driver.machine.state.jobs[job], node) / GB


def test_a_job_that_names_its_nodes_is_refused_where_its_states_do_not_fit_beside_the_others(driver):
    assert isinstance(join(driver, "a"), m.Registered)
    refused = join(driver, "b")
    assert refused == m.Refused(
        about="register",
        reason="job 'b' needs 562.0 GB of host memory on node 't0' (parameters 150.0, optimizer 300.0, processes 112.0): of"
        " 1000.0 GB there, 438.0 GB are free; held by a 562.0 GB (declared); it fits on t1",
    )
    assert "b" not in driver.machine.state.jobs
    assert isinstance(join(driver, "b", {"train": ["t1"]}), m.Registered)
    assert join(driver, "c").reason.endswith("held by a 562.0 GB (declared); it fits when a has ended")


def test_what_can_never_fit_is_told_so(driver):
    assert join(driver, "a", needs={"train": {"parameters": 900 * GB}}).reason.endswith("no job holds any; it never fits there")


def test_several_have_to_end_where_one_is_not_enough(driver):
    quarter = {"train": {"parameters": 190 * GB}}
    for job in "abc":
        join(driver, job, needs=quarter, nodes={"train": ["t0"]})
        join(driver, job + "1", needs=quarter, nodes={"train": ["t1"]})
    assert join(driver, "d", needs={"train": {"parameters": 888 * GB}}).reason.endswith("it fits when a and b and c have ended")


def test_a_pool_is_looked_at_node_by_node_and_a_colocated_job_counts_both_of_its_sides(driver):
    join(driver, "a", {"train": ["t1"]})
    assert "on node 't1'" in join(driver, "b", {"train": ["train"]}).reason
    both = {"rollout": ["t0"], "train": ["t0"]}
    needs = {"rollout": {"synced": 2 * GB}, "train": {"parameters": 100 * GB}}
    join(driver, "c", both, needs)
    assert counted(driver, "c") == 2 + 100 + 2 * 8 * 14


def test_the_kind_of_a_pool_says_what_a_process_takes():
    driver = Driver(Machine(config(pools={**POOLS, "rollout": {**POOLS["rollout"], "kind": "core"}})))
    join(driver, "a", {"rollout": ["r0"]}, {"rollout": {"synced": GB}})
    assert counted(driver, "a", "r0") == 1 + 8 * 4


def test_until_it_has_settled_the_larger_of_told_and_measured_counts_and_then_the_most_that_was_measured(driver):
    join(driver, "a")
    measure(driver, "a", 100)
    assert counted(driver, "a") == 562, "it still starts up"
    measure(driver, "a", 600)
    assert counted(driver, "a") == 600
    measure(driver, "a", 100)
    assert counted(driver, "a") == 562, "what start-up took for a while does not count for ever"
    finish(driver, "a", 2)
    assert counted(driver, "a") == 562, "nothing was measured since"
    measure(driver, "a", 200)
    measure(driver, "a", 180)
    assert counted(driver, "a") == 200
    assert isinstance(join(driver, "b"), m.Registered), "there is room by what was measured"


def test_more_than_the_node_has_ends_nobody_and_lets_nobody_in(driver):
    join(driver, "a")
    finish(driver, "a", 2)
    measure(driver, "a", 1010)
    refused = join(driver, "b", needs={}).reason
    assert "of 1000.0 GB there, 10.0 GB too many are held; held by a 1010.0 GB (measured by its host's agent)" in refused
    assert driver.machine.state.jobs["a"].state.value == "live"


def test_a_filler_counts_by_what_is_measured(driver):
    join(driver, "a")
    join(driver, "f", needs={}, filler=True)
    measure(driver, "f", 440)
    assert "f 440.0 GB (measured by its host's agent)" in join(driver, "b", needs={"train": {"parameters": 1}}, gpus=0).reason


def test_host_memory_of_a_dead_job_comes_free_with_its_last_process(driver):
    join(driver, "a")
    driver.do(DriverDied(job="a", uid="a:1"))
    assert "held by a" in join(driver, "b").reason
    driver.do(ProcessesGone(job="a", uid="a:1"))
    assert isinstance(join(driver, "b"), m.Registered)


def seen(driver, host, num_gb, source="/sys/fs/cgroup/pod"):
    """As an agent on the host reports what there is."""
    name = m.HostName(host, [], "boot", "1")
    about = {"memory_total": num_gb * GB, "memory_source": source}
    report = m.AgentReport(agent="x", number=1, host=name, source="unknown", **about)
    out = Sights().take(report, driver.machine.state, 1.0)
    for what in out:
        driver.do(what)
    return [type(what) for what in out]


def test_what_a_host_has_counts_where_it_is_less_than_the_file_says(driver):
    seen(driver, "hostb", 600)
    assert isinstance(join(driver, "a"), m.Registered)
    refused = join(driver, "b", {"train": ["t1"]}).reason
    limit = "of 600.0 GB there (for t0, t1 by /sys/fs/cgroup/pod of host hostb), 38.0 GB are free"
    assert refused.endswith(f"{limit}; held by a 562.0 GB (declared); it fits when a has ended")
    node = describe(driver.machine.state, driver.machine.config, 9.0, {})["pools"]["train"]["nodes"]["t0"]["host_memory"]
    assert (node["capacity"], node["capacity_source"]) == (600 * GB, "/sys/fs/cgroup/pod of host hostb")
    seen(driver, "hostb", 5000, "the machine")
    assert isinstance(join(driver, "b", {"train": ["t1"]}), m.Registered)


def test_a_job_on_two_nodes_of_one_host_needs_room_for_both(driver):
    seen(driver, "hostb", 1000)
    refused = join(driver, "a", {"train": ["t0", "t1"]}).reason
    assert "needs 1124.0 GB of host memory on node 't0' and 't1'" in refused and "it never fits there" in refused


def test_a_host_that_says_nothing_new_takes_no_place_in_the_journal(driver):
    assert HostRoom in seen(driver, "hostb", 600) and HostRoom not in seen(driver, "hostb", 600)
    assert HostRoom in seen(driver, "hostb", 500)


def test_a_job_that_runs_is_taken_back_however_full_the_node_is(driver):
    join(driver, "a")
    measure(driver, "a", 990)
    who = {"uid": "a:1", "client": "another"}
    more = driver.do(m.Register(job="a", **who, host="here", pid=7, started=1, nodes=T0, host_memory=BIG))
    assert isinstance(more[0], m.Registered), "one more client of the same job"
    fresh = Driver(Machine(config(pools=POOLS)))  # the coordinator lost its memory
    assert isinstance(join(fresh, "a"), m.Registered)
    assert isinstance(join(fresh, "b", again=True, placed=T0), m.Registered)


def test_a_job_tells_what_it_holds_where_no_agent_is_heard(driver):
    join(driver, "a")
    finish(driver, "a", 2)
    report = m.HostReport(**driver.who("a"), node="t0", bytes={"private": 300 * GB, "shared": 0})
    driver.do(report)
    assert driver.machine.state.jobs["a"].host_memory["t0"].measured == {"private": 300 * GB}
    assert driver.logged[-1].event == "host_memory"
    assert driver.logged[-1].extra == {
        "job": "a", "node": "t0", "bytes": 300 * GB, "kinds": {"private": 300 * GB}, "source": "job",
        "counted": 300 * GB, "node_bytes": 300 * GB, "capacity": 1000 * GB,
    }  # fmt: skip
    driver.do(HostSeen(host=m.HostName("hostb", [], "boot", "1")))
    driver.do(m.HostReport(**driver.who("a"), node="t0", bytes={"private": 900 * GB}))
    assert counted(driver, "a") == 300, "who looks from outside is believed"
    (refused,) = driver.do(m.HostReport(**driver.who("a"), node="t1", bytes={}))
    assert refused.reason == "job 'a' reports host memory on 't1'; allowed: its nodes t0"


# --- what an agent's report says ---


def report(*holders, host="hostb"):
    member = [m.Member(host, pid, 1, "boot", "1") for pid in range(len(holders))]
    told = [Holder(uid, at, device, {"private": held}) for at, (uid, device, held) in zip(member, holders, strict=True)]
    return m.AgentReport(agent="g", number=1, host=m.HostName(host, [], "boot", "1"), source="ledger", holders=told)


def test_a_process_counts_for_the_node_whose_device_it_uses_else_for_all_of_its_job_there(driver):
    join(driver, "a", {"train": ["t0", "t1"]}, {"train": {"parameters": GB}})
    state, here = driver.machine.state, driver.machine.config
    held = report(("a:1", {"t0": 5}, 10 * GB), ("a:1", {"t1": 5}, 20 * GB), ("a:1", {}, 4 * GB), ("stranger", {}, 99 * GB))
    assert hosts.seen(held, state, here) == [
        HostMeasured(job="a", uid="a:1", node="t0", bytes={"private": 12 * GB}),
        HostMeasured(job="a", uid="a:1", node="t1", bytes={"private": 22 * GB}),
    ]
    assert hosts.seen(report(("a:1", {}, GB), host="hostc"), state, here) == [], "none of its nodes is there"


def test_small_changes_are_no_news(driver):
    join(driver, "a")
    state, here = driver.machine.state, driver.machine.config

    def news(num_bytes):
        found = hosts.seen(report(("a:1", {}, num_bytes)), state, here)
        for what in found:
            driver.do(what)
        return len(found)

    assert [news(10 * GB), news(10 * GB + 10**8), news(10 * GB + 3 * 10**8), news(9 * GB)] == [1, 0, 1, 1]


# --- where it is seen ---


def test_status_and_prometheus_show_it(driver):
    join(driver, "a")
    measure(driver, "a", 100)
    found = describe(driver.machine.state, driver.machine.config, 9.0, {})
    node = found["pools"]["train"]["nodes"]["t0"]["host_memory"]
    told = {"parameters": 150 * GB, "optimizer": 300 * GB, "processes": 112 * GB}
    entry = {"counted": 562 * GB, "told": told, "measured": {"private": 100 * GB}, "source": "agent", "most": 0}
    assert node == {"capacity": 1000 * GB, "capacity_source": "the coordinator's file", "held": 562 * GB, "jobs": {"a": entry}}
    where, samples = {"pool": "train", "node": "t0"}, list(coordinator_samples(found))
    assert ("mux_node_host_capacity_bytes", where, 1000 * GB) in samples
    assert ("mux_node_host_bytes", where | {"job": "a"}, 562 * GB) in samples
    measured = where | {"job": "a", "kind": "private", "source": "agent"}
    assert ("mux_node_host_measured_bytes", measured, 100 * GB) in samples


# --- any sequence ---

NODES = {"t0": 100, "t1": 60, "u0": None}  # GB
SMALL = {"train": {"nodes": [{"name": node, "host_bytes": gb * GB if gb else None} for node, gb in NODES.items()]}}
SEQUENCES = int(os.environ.get("HOST_LEDGER_SEQUENCES", 1_000))


class Told:
    """One job as it really is: the test's own account, by node in GB."""

    def __init__(self, needs):
        self.needs, self.now, self.most, self.steps = needs, dict.fromkeys(needs, 0), dict.fromkeys(needs, 0), 0

    def may_hold(self, node):
        """What was agreed: what it told, or has shown since it settled; or what it holds, if that is more."""
        return self.most.get(node) or max(self.needs.get(node, 0), self.now.get(node, 0))


class Sequence:
    """Random jobs come, are measured, leave and die; the coordinator starts again. Nobody is let in beyond what a node has."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.honest = self.draw.random() < 0.5  # nobody holds more than agreed
        self.config = config(pools=SMALL)
        self.driver, self.jobs, self.lost_memory = Driver(Machine(self.config)), {}, False
        self.admitted = self.refused = 0

    def run(self):
        moves = [self.come, self.come, self.come, self.measure, self.measure, self.step, self.step, self.leave, self.restart]
        for _ in range(self.draw.randint(5, 25)):
            move = self.draw.choice(moves)
            if move in (self.come, self.restart):
                move()
            elif self.jobs:
                move(self.draw.choice(sorted(self.jobs)))
            if self.honest and not self.lost_memory:
                self.check("held", NODES)

    def check(self, what, nodes):
        for node in nodes:
            held, capacity = sum(job.may_hold(node) for job in self.jobs.values()), NODES[node]
            assert capacity is None or held <= capacity, f"{what}: {held} GB of {capacity} on {node}"

    def register(self, job, needs, again=False):
        nodes = {side: [node] for side, node in zip(m.SIDES, needs, strict=False)}
        memory = {side: {"parameters": needs[node] * GB} for side, (node,) in nodes.items()}
        back = {"again": True, "placed": nodes} if again else {}
        return isinstance(self.driver.register(job, nodes, host_memory=memory, **back)[0], m.Registered)

    def come(self):
        name = self.draw.choice("abcdef")
        if name in self.jobs:
            return
        nodes = self.draw.sample(sorted(NODES), self.draw.randint(1, 2))
        job = Told({node: self.draw.choice([0, 10, 25, 40, 60, 90]) for node in nodes})
        before = msgspec.msgpack.encode(self.driver.machine.state)
        if self.register(name, job.needs):
            self.jobs[name], self.admitted = job, self.admitted + 1
            self.check("admitted", nodes)
        else:
            self.refused += 1
            assert msgspec.msgpack.encode(self.driver.machine.state) == before

    def measure(self, name):
        job = self.jobs[name]
        node = self.draw.choice(sorted(job.needs))
        job.now[node] = self.draw.randint(0, job.may_hold(node) if self.honest else 120)
        if job.steps >= hosts.SETTLED:
            job.most[node] = max(job.most[node], job.now[node])
        found = {"private": job.now[node] * GB}
        report = m.HostReport(**self.driver.who(name), node=node, bytes=found)
        self.driver.do(self.draw.choice([report, HostMeasured(job=name, uid=f"{name}:1", node=node, bytes=found)]))

    def step(self, name):
        self.jobs[name].steps += 1
        finish(self.driver, name, self.jobs[name].steps)

    def leave(self, name):
        del self.jobs[name]
        if self.draw.random() < 0.5:
            return self.driver.do(m.Deregister(**self.driver.who(name)))
        for what in (DriverDied, ProcessesGone):
            self.driver.do(what(job=name, uid=f"{name}:1"))

    def restart(self):
        """From its journal it is what it was; without one jobs that run come back, and count as if they had just come."""
        if self.draw.random() < 0.7:
            again = Machine(self.config)
            for event in self.driver.events:
                again.handle(event)
            assert again.state == self.driver.machine.state
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(again.state), type=State) == again.state
            self.driver.machine = again
            return
        self.driver, self.lost_memory = Driver(Machine(self.config)), True
        for name, job in self.jobs.items():
            assert self.register(name, job.needs, again=True)
            self.jobs[name] = Told(job.needs)


def test_nobody_is_let_in_beyond_a_nodes_memory_in_any_sequence():
    """HOST_LEDGER_SEQUENCES=10000: so many; they take half a minute."""
    sequences = [Sequence(seed) for seed in range(SEQUENCES)]
    for sequence in sequences:
        sequence.run()
    assert sum(sequence.admitted for sequence in sequences) > SEQUENCES
    assert sum(sequence.refused for sequence in sequences) > SEQUENCES / 2


ONE_LESS = {**DRIVER_POOLS, "rollout": {"nodes": [{"name": "r0"}]}}


@pytest.fixture
def named():
    named = Driver(Machine(config()))
    named.register("a", nodes={"rollout": ["r0"], "train": ["t0"]})
    return named


def refusal(named, **keys):
    return hosts.change_refusal(named.machine.state, named.machine.config, config(**keys))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"more": {"nodes": [{"name": "m0"}]}}, None),
        ({"rollout": {"nodes": [{"name": "r0", "gpus": 4}, {"name": "r1"}]}}, "node 'r0' is another"),
        ({"rollout": {"nodes": [{"name": "r0"}, {"name": "t0"}]}, "train": {"nodes": [{"name": "r1"}]}}, "is another"),
    ],
)
def test_nodes_may_be_added_but_not_become_others(named, changed, words):
    found = refusal(named, pools={**DRIVER_POOLS, **changed})
    assert found is None if words is None else words in found


def test_a_node_may_be_removed_when_it_is_draining_and_nobodys(named):
    assert "node 'r1' is missing, and is not draining: give it `drain: true` first" in refusal(named, pools=ONE_LESS)
    named.reload(drain=["r1"])
    assert refusal(named, pools=ONE_LESS) is None


def test_a_node_that_is_held_or_a_jobs_is_refused_by_name(named):
    less = {**DRIVER_POOLS, "rollout": {"nodes": [{"name": "r1"}]}}
    named.reload(drain=["r0"])
    assert "node 'r0' is missing, and job 'a' is registered on it" in refusal(named, pools=less)
    named.reload(undrain=["r0"])
    named.ask("a", "rollout", 1, ["r0"])
    assert "node 'r0' is missing, and job 'a' holds it" in refusal(named, pools=less)


def test_what_is_not_a_pool_takes_a_restart(named):
    after = config(lease_timeout=9, kill_grace=3)
    assert hosts.restart_needed(named.machine.config, after).startswith("lease_timeout, kill_grace changed")
    assert hosts.restart_needed(named.machine.config, config()) is None


def test_a_drained_node_is_given_to_nobody_and_its_holder_keeps_it(named):
    named.ask("a", "rollout", 1, ["r0"])
    named.reload(drain=["r0"])
    assert named.holders("r0") == ["a"]
    named.release("a")
    named.ask("a", "rollout", 2, ["r0"])
    assert named.holders("r0") == []
    named.reload(undrain=["r0"])
    assert named.holders("r0") == ["a"]


def test_a_node_may_begin_and_cease_to_drain_while_it_is_held(named):
    named.ask("a", "rollout", 1, ["r0"])
    drained = {**DRIVER_POOLS, "rollout": {"nodes": [{"name": "r0", "drain": True}, {"name": "r1"}]}}
    assert refusal(named, pools=drained) is None
    named.reload(drain=["r0"])
    assert refusal(named) is None
    assert [(line.extra["node"], line.extra["undo"]) for line in named.logged if line.event == "node_draining"] == [("r0", False)]
