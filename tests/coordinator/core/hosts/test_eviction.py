"""Who waits for host memory, who leaves it for the disk and in which order, and that everybody comes on."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from tests.coordinator.core.hosts.test_memory import GB, finish
from tests.coordinator.driver import Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.hosts import memory
from verl_mux.coordinator.core.hosts.eviction import Resident, choose
from verl_mux.coordinator.core.hosts.pools import refusal
from verl_mux.coordinator.core.inputs_and_instructions import DriverDied, HostMeasured, ProcessesGone, Settled
from verl_mux.coordinator.core.records import JobState, State
from verl_mux.coordinator.core.settings import Pool
from verl_mux.coordinator.core.snapshot import describe
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.prometheus_text import prometheus_text

NODES = {"t0": 100, "t1": 60, "u0": None}  # GB
POOLS = {"train": {"nodes": [{"name": node, "host_bytes": gb * GB if gb else None} for node, gb in NODES.items()]}}
T0 = {"train": ["t0"]}


def resident(name, held, runs=False, turn=None):
    return Resident(name, {"t0": held} if isinstance(held, int) else held, runs, turn)


@pytest.mark.parametrize(
    ("lack", "residents", "leave"),
    [
        (10, [resident("runs", 50, runs=True), resident("rests", 20)], ["rests"]),
        (10, [resident("next", 50, turn=0), resident("later", 20, turn=3), resident("soon", 50, turn=1)], ["later"]),
        (10, [resident("asked", 50, turn=9), resident("has not", 20)], ["has not"]),
        (10, [resident("small", 20), resident("large", 50), resident("same", 50)], ["large"]),
        (60, [resident("small", 20), resident("large", 50), resident("runs", 90, runs=True)], ["large", "small"]),
        (80, [resident("rests", 20), resident("runs", 90, runs=True)], ["runs"]),
        (80, [resident("rests", 20), resident("runs", 50, runs=True)], None),
        (0, [resident("rests", 20)], []),
        (
            {"t0": 10, "t1": 5},
            [resident("both", {"t0": 9, "t1": 9}), resident("one", {"t0": 20}), resident("too small", {"t1": 4})],
            ["one", "both"],
        ),
    ],
)
def test_first_who_does_not_run_then_whose_turn_is_farthest_then_the_largest_and_no_more_than_needed(lack, residents, leave):
    assert choose({"t0": lack} if isinstance(lack, int) else lack, residents) == leave


def test_of_any_jobs_just_enough_leave_or_nobody():
    draw = random.Random(0)
    for _ in range(2_000):
        residents = [
            resident(at, {node: draw.choice([0, 5, 20, 40]) for node in "ab"}, draw.random() < 0.5, draw.choice([None, 0, 3]))
            for at in range(draw.randint(0, 6))
        ]
        lack = {node: draw.randint(0, 90) for node in "ab"}
        chosen = choose(lack, residents)
        if chosen is None:
            assert not enough(residents, lack)
            continue
        leave = [it for it in residents if it.name in chosen]
        assert enough(leave, lack)
        for spared in leave if any(lack.values()) else ():
            assert not enough([it for it in leave if it is not spared], lack), "nobody leaves in vain"


def enough(residents, lack):
    return all(sum(it.held[node] for it in residents) >= num_bytes for node, num_bytes in lack.items())


# --- through the coordinator ---


@pytest.fixture
def driver():
    return Driver(Machine(config(pools=POOLS, evict_to_disk_after=3)))


def join(driver, job, gb, nodes=T0, start=1, movable=True, **keys):
    return driver.register(
        job, nodes, uid=f"{job}:{start}", host_memory={"train": {"parameters": gb * GB}}, movable=movable, **keys
    )


def step(driver, job, number):
    """It asks for its training phase, which is granted unless others are before it."""
    return driver.ask(job, "train", number, ["t0"])


def ack(driver, job):
    return driver.do(m.Heartbeat(**who(driver, job), beat=1))[-1]


def beat(driver, job):
    """The number that it is told."""
    return ack(driver, job).move


def who(driver, job):
    return {**driver.who(job), "uid": driver.machine.state.jobs[job].uid}


def leave(driver, job, done):
    number = driver.machine.state.evictions[job].number
    return driver.do(m.Deregister(**who(driver, job), moving=number, step=done, saving_s=0.5))


def lines(driver, event):
    return [line.extra for line in driver.logged if line.event == event]


def test_a_job_that_does_not_fit_waits_until_another_has_saved_and_left_and_that_one_until_there_is_room_again(driver):
    join(driver, "a", 60)
    step(driver, "a", 1)
    (queued,) = join(driver, "b", 50)
    assert queued.nodes == T0 and queued.reason == "job 'b' waits for host memory on t0"
    assert ack(driver, "b").queued == ["register"]
    assert beat(driver, "a") == 0, "it has not been there for long enough"
    driver.release("a")
    assert lines(driver, "eviction_asked") == [{"job": "a", "number": 1, "room_for": "b", "bytes": {"t0": 60 * GB}}]
    assert beat(driver, "a") == 1
    step(driver, "a", 2)
    assert beat(driver, "a") == 1
    driver.release("a")
    sent = leave(driver, "a", 2)
    assert sent[-1] == m.Registered(nodes=T0, places=sent[-1].places, lease_timeout=5, epoch="", first=True, filler_grace=2.0)
    assert lines(driver, "evicted_to_disk") == [{"job": "a", "number": 1, "done": 2, "saving_s": 0.5}]
    assert lines(driver, "room_found") == [{"job": "b", "nodes": T0}]
    assert ack(driver, "b").queued == [], "it asks again if it was not told"
    (queued,) = join(driver, "a", 60, start=2)
    assert isinstance(queued, m.Queued)
    driver.do(m.Deregister(**driver.who("b")))
    assert driver.machine.state.jobs["a"].nodes == T0 and driver.sent[-1].message.nodes == T0
    assert lines(driver, "room_found")[-1] == {"job": "a", "nodes": T0}


def test_without_the_key_it_is_refused_and_what_can_never_fit_is_with_it(driver):
    join(driver, "a", 60)
    assert "needs 101.0 GB" in join(driver, "b", 101)[0].reason
    strict = Driver(Machine(config(pools=POOLS)))
    join(strict, "a", 60)
    assert "held by a 60.0 GB (told)" in join(strict, "b", 50)[0].reason


@pytest.mark.parametrize("why", ["nobody starts it again", "it has done no step", "it is through", "it is silent"])
def test_who_is_not_asked(driver, why):
    join(driver, "a", 60, movable=why != "nobody starts it again", steps=1)
    if why != "it has done no step":
        step(driver, "a", 1)
        driver.release("a")
    if why == "it is through":
        finish(driver, "a", 1)
    if why == "it is silent":
        driver.wait(6)
    driver.now += 10
    assert isinstance(join(driver, "b", 50)[0], m.Queued)
    assert not driver.machine.state.evictions


def test_a_job_that_only_looks_is_told_its_nodes_and_nobody_leaves_for_it(driver):
    join(driver, "a", 60)
    step(driver, "a", 1)
    driver.now += 10
    (queued,) = join(driver, "b", 50, only_looks=True)
    assert queued.nodes == T0 and set(queued.places) == {"t0"}
    assert not driver.machine.state.evictions
    driver.do(m.Detach(**driver.who("b")))
    assert not driver.machine.state.rooms and "b" not in driver.machine.state.jobs


def test_nobody_leaves_any_more_for_a_job_that_is_gone_or_has_found_room(driver):
    for way in ("gone", "found room"):
        join(driver, "a", 60)
        join(driver, "c", 30)
        step(driver, "a", 1)
        driver.now += 10
        join(driver, "b", 30)
        assert list(driver.machine.state.evictions) == ["a"]
        driver.do(m.Deregister(**driver.who("b" if way == "gone" else "c")))
        assert not driver.machine.state.evictions and beat(driver, "a") == 0
        # What it had saved for by then it says all the same, and it is away until it is started again.
        driver.do(m.Deregister(**driver.who("a"), moving=driver.machine.state.num_moves, step=1))
        assert driver.machine.state.jobs["a"].state is JobState.ENDED
        for other in ("b", "c"):
            if driver.machine.state.jobs.get(other) and driver.machine.state.jobs[other].state is JobState.LIVE:
                driver.do(m.Deregister(**driver.who(other)))


def test_they_come_in_in_the_order_in_which_they_came_and_those_on_other_nodes_beside_them(driver):
    join(driver, "a", 90)
    join(driver, "b", 50)
    assert isinstance(join(driver, "c", 5)[0], m.Queued), "it would fit, but stands behind b"
    assert isinstance(join(driver, "d", 5, {"train": ["t1"]})[0], m.Registered)
    driver.do(m.Deregister(**driver.who("a"), reason="failed"))
    assert not driver.machine.state.rooms
    assert [line["job"] for line in lines(driver, "room_found")] == ["b", "c"]


def test_a_dying_job_that_makes_room_is_waited_for_and_nobody_else_asked(driver):
    join(driver, "a", 60)
    join(driver, "c", 40)
    step(driver, "c", 1)
    driver.now += 10
    driver.do(DriverDied(job="a", uid="a:1"))
    join(driver, "b", 50)
    assert not driver.machine.state.evictions
    driver.do(ProcessesGone(job="a", uid="a:1"))
    assert not driver.machine.state.rooms


def test_who_waits_holds_no_start_gate_no_turn_and_no_barrier(driver):
    schedule = [{"mode": "sequential", "steps": 1}, {"mode": "interleaved"}]
    driver = Driver(Machine(config(pools=POOLS, evict_to_disk_after=3, expect_jobs=2, schedule=schedule)))
    join(driver, "a", 60)
    join(driver, "b", 50)
    assert any(isinstance(answer, m.LeaseGrant) for answer in step(driver, "a", 1))
    driver.release("a")
    assert any(isinstance(answer, m.LeaseGrant) for answer in step(driver, "a", 2))


def test_while_nobody_knows_who_is_there_newcomers_wait_and_those_who_were_are_taken_back(driver):
    state = State(settle_until=5.0)
    driver = Driver(Machine(config(pools=POOLS, evict_to_disk_after=3), state=state))
    assert isinstance(join(driver, "b", 50)[0], m.Queued)
    assert isinstance(join(driver, "c", 10, again=True)[0], m.Queued), "it waited before as well"
    assert isinstance(join(driver, "a", 60, again=True, placed=T0)[0], m.Registered)
    driver.do(Settled())
    assert list(driver.machine.state.rooms) == ["b", "c"]


def test_a_job_whose_older_registration_came_late_to_a_coordinator_that_forgot_everything_keeps_its_lease(driver):
    driver = Driver(Machine(config(pools=POOLS, evict_to_disk_after=3), state=State(settle_until=50.0, unknown_up_to=100)))
    assert isinstance(join(driver, "a", 60)[0], m.Queued), "sent when it came, before the earlier coordinator let it in"
    claim = m.Claim(token=7, key="k", phase="train", step=2, nodes=["t0"], granted_at=0.0)
    back = join(driver, "a", 60, again=True, placed=T0, held=[claim], number=2)
    assert isinstance(back[0], m.Registered)
    assert [lease.token for lease in driver.machine.state.leases_of("a")] == [7] and not driver.machine.state.rooms


def test_a_node_for_whose_room_a_job_waits_stays(driver):
    join(driver, "a", 60)
    join(driver, "b", 50)
    before, state = driver.machine.config, driver.machine.state
    state.jobs["a"].state = JobState.ENDED
    state.draining.append("t0")
    pools = {"train": Pool(nodes=[node for node in before.nodes.values() if node.name != "t0"])}
    assert "job 'b' waits for room on it" in refusal(state, before, msgspec.structs.replace(before, pools=pools))


def test_it_is_seen(driver):
    join(driver, "a", 60)
    step(driver, "a", 1)
    driver.now += 10
    join(driver, "b", 50)
    join(driver, "c", 50)
    shown = describe(driver.machine.state, driver.machine.config, driver.now + 2, {})
    rooms = shown["host_rooms"]
    assert rooms["leaving"] == ["a"] and list(rooms["waiting"]) == ["b", "c"] and rooms["evicted"] == 0
    assert rooms["told"] == {
        "a": "makes room for b: asked 3 s ago, it saves and leaves at the end of its step",
        "b": "waits for host memory on t0; a will leave for it",
        "c": "waits for host memory on t0; 1 jobs wait before it",
    }
    text = prometheus_text(shown)
    assert 'mux_job_host_memory_wait_seconds{job="b"} 3' in text and "mux_jobs_evicted_to_disk 0" in text


# --- any sequence ---

SEQUENCES = int(os.environ.get("HOST_LEDGER_SEQUENCES", 500))


class Sequence:
    """Random jobs come, take turns, are measured, leave when they are asked, come back, end and die; the coordinator starts again
    from its journal. Beside the machine: what each job that is in may hold, in GB."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.config = config(pools=POOLS, evict_to_disk_after=self.draw.choice([0.5, 4, 30]), lease_timeout=1e6)
        self.driver, self.told, self.needs, self.starts = Driver(Machine(self.config)), {}, {}, {}
        self.evicted = self.waited = 0

    @property
    def state(self):
        return self.driver.machine.state

    def live(self):
        return [name for name in self.needs if name in self.state.jobs and self.state.jobs[name].state is JobState.LIVE]

    def inside(self):
        return [name for name in self.live() if name not in self.state.rooms]

    def run(self):
        moves = [self.come] * 2 + [self.work] * 3 + [self.measure] + [self.leave] * 2 + [self.end, self.restart]
        for _ in range(self.draw.randint(10, 40)):
            self.driver.now += self.draw.choice([0, 1, 5])
            self.draw.choice(moves)()
            self.check()
        self.drain()

    def check(self):
        for node, capacity in NODES.items():
            held = sum(self.needs[name].get(node, 0) for name in self.inside())
            assert capacity is None or held <= capacity, f"{held} GB of {capacity} on {node}"
        for name, it in self.state.evictions.items():
            assert name in self.inside() and it.room_for in self.state.rooms

    def come(self):
        name = self.draw.choice("abcdef")
        if name not in self.live():
            nodes = self.draw.sample(sorted(NODES), self.draw.randint(1, 2))
            self.told[name] = nodes, self.draw.choice([5, 10, 25, 40, 60, 90])
            self.start(name)

    def start(self, name):
        nodes, gb = self.told[name]
        self.needs[name] = dict.fromkeys(nodes, gb)
        self.starts[name] = self.starts.get(name, 0) + 1
        answer = join(self.driver, name, gb, {"train": nodes}, start=self.starts[name])[0]
        if isinstance(answer, m.Refused):
            assert any(NODES[node] is not None and gb > NODES[node] for node in nodes)
            del self.needs[name]
        self.waited += isinstance(answer, m.Queued)

    def work(self):
        if inside := self.inside():
            name = self.draw.choice(inside)
            job = self.state.jobs[name]
            if leases := self.state.leases_of(name):
                self.driver.do(m.LeaseRelease(**who(self.driver, name), token=leases[0].token))
            elif not any(request.job == name for request in self.state.requests):
                number, nodes = job.asked + 1, list(self.needs[name])
                asks = {**who(self.driver, name), "key": f"{name}.{self.starts[name]}.{number}", "phase": "train"}
                self.driver.do(m.LeaseRequest(**asks, step=number, nodes=nodes))

    def measure(self):
        """Nobody holds more than it told."""
        if inside := self.inside():
            name = self.draw.choice(inside)
            node = self.draw.choice(list(self.needs[name]))
            held = {"private": self.draw.randint(0, self.needs[name][node]) * GB}
            self.driver.do(HostMeasured(job=name, uid=self.state.jobs[name].uid, node=node, bytes=held))
            if self.state.jobs[name].host_memory[node].most:
                self.needs[name][node] = memory.counted(self.state.jobs[name], node) // GB

    def leave(self):
        """One that was asked, at the end of a step: never before it made one since."""
        if asked := [name for name in self.state.evictions if not self.state.leases_of(name)]:
            name = self.draw.choice(asked)
            leave(self.driver, name, self.state.jobs[name].asked)
            self.evicted += 1
            self.start(name)

    def end(self):
        if live := self.live():
            name = self.draw.choice(live)
            uid = self.state.jobs[name].uid
            if self.draw.random() < 0.5:
                self.driver.do(m.Deregister(**who(self.driver, name), reason="finished"))
            else:
                self.driver.do(DriverDied(job=name, uid=uid))
                self.driver.do(ProcessesGone(job=name, uid=uid))

    def restart(self):
        again = Machine(self.config)
        for event in self.driver.events:
            again.handle(event)
        assert again.state == self.state
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(again.state), type=State) == again.state
        self.driver.machine = again

    def drain(self):
        """Nobody new comes, and jobs make a step and end: then all who wait, the evicted among them, come in."""
        for _ in range(100):
            if not self.live():
                return
            if not self.state.rooms or self.draw.random() < 0.2:
                self.end_one_that_is_in()
            else:
                self.driver.now += 40
                self.work()
                self.leave()
            self.check()
        raise AssertionError(f"still there: {self.live()}, waiting: {list(self.state.rooms)}")

    def end_one_that_is_in(self):
        name = self.draw.choice(self.inside())
        self.driver.do(m.Deregister(**who(self.driver, name), reason="finished"))


def test_nobody_is_let_in_beyond_a_nodes_memory_and_everybody_comes_in_in_any_sequence():
    """HOST_LEDGER_SEQUENCES=10000: so many."""
    sequences = [Sequence(seed) for seed in range(SEQUENCES)]
    for sequence in sequences:
        sequence.run()
    assert sum(sequence.evicted for sequence in sequences) > SEQUENCES / 2
    assert sum(sequence.waited for sequence in sequences) > SEQUENCES
