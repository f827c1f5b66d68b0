"""Replicas that join a rollout and leave it, with a running coordinator; a tail that is gathered. On real engines: tests/e2e."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.messages import Member
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.rollout.control.replica_plan import Migration, MigrationPolicy, Room, Stay, Unit, units
from verl_mux.rollout.instructions import RunningSample
from verl_mux.trainer import replica_moves as module
from verl_mux.trainer.replica_moves import Growth, TailMigration

OWN, OTHER = Unit(("r0",), (0,), ("a",)), Unit(("r1",), (1,), ("b",))
_LIMIT_S = 20.0


class Engines:
    """Which servers are asked, what runs where, and what was done, in order; as Ray's handles say it."""

    def __init__(self, monkeypatch) -> None:
        self.asked, self.awake, self.done, self.noted = {"a", "b"}, {"a"}, [], []
        self.running: dict[int, str] = {}
        self.lock, self.changed = threading.RLock(), threading.Condition()
        self.phases = SimpleNamespace(log=self, device=lambda: self.lock)
        self.units, self.manager = lambda asked: [OWN, OTHER], SimpleNamespace(each=lambda verb, ranks: [])
        monkeypatch.setattr(module.ray, "get", lambda answers: answers)
        self.worker = SimpleNamespace(
            running_samples=_remote(self._samples), evacuate=_remote(self._evacuate), redirect=_remote(self._redirect)
        )

    def join(self, unit, lease) -> None:
        self._do("join", unit.servers[0])
        self.awake.add(unit.servers[0])

    def part(self, unit) -> None:
        assert unit.servers[0] not in self.running.values()
        self._do("part", unit.servers[0])
        self.awake.discard(unit.servers[0])

    def log(self, name, seconds, extra, step) -> None:
        self.noted.append((name, extra, step))

    def wait_for(self, verb) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.done and self.done[-1][0] == verb, _LIMIT_S), self.done

    def _do(self, *what) -> None:
        with self.changed:
            self.done.append(what)
            self.changed.notify_all()

    def handle(self, server):
        return server.upper()

    def accept_requests(self, some) -> None:
        servers = {name for unit in some for name in unit.servers}
        assert servers <= self.awake
        self.asked |= servers

    def refuse_requests(self, some) -> None:
        self.asked -= {name for unit in some for name in unit.servers}

    def _samples(self):
        self._do("look")
        return [RunningSample("g", number, at, 40, 30, 0.0) for number, at in self.running.items()], 0.01

    def _evacuate(self, servers, targets) -> int:
        leaving = [number for number, at in self.running.items() if at in servers]
        self.running.update(dict.fromkeys(leaving, "a"))
        return len(leaving)

    def _redirect(self, targets) -> None:
        self._do("redirect", len(targets))
        self.running.update({number: server for (_, number), (server, _) in targets.items()})


def _remote(function):
    return SimpleNamespace(remote=function)


@pytest.fixture
def pool():
    nodes = {"rollout": {"nodes": [{"name": "r0"}, {"name": "r1"}]}, "train": {"nodes": [{"name": "t0"}, {"name": "t1"}]}}
    with Coordinator(make_config({"pools": nodes})) as coordinator:
        yield coordinator


@pytest.fixture
def engines(monkeypatch):
    return Engines(monkeypatch)


@pytest.fixture
def owner(pool):
    """The job whose node is lent."""
    mux = connect(pool.address, "owner", {"rollout": ["r1"], "train": ["t1"]}, uid="owner:1")
    yield mux
    mux.close()


@pytest.fixture
def growth(pool, engines, monkeypatch):
    borrower = connect(pool.address, "grower", {"rollout": ["r1"]}, uid="grower:1", filler=True)
    it = Growth(["r0"], engines, [engines.worker], Room(100, 64, 10**6), lambda nodes: borrower)
    monkeypatch.setattr("verl_mux.rollout.control.replica_plan.GROWTH_MIN_GAIN_S", 0.01)
    yield it
    it.__exit__(None)


JOIN, PART = ("join", "b"), ("part", "b")


def begin(growth, engines, step=1) -> None:
    growth.nodes_are_held(step)
    with growth._changed:  # its own engines take longer to wake than an answer
        assert growth._changed.wait_for(lambda: growth._granted, _LIMIT_S)
    growth.engines_are_awake()
    assert engines.done[-1:] == [JOIN] and engines.asked == {"a", "b"}


def test_an_idle_node_is_there_before_anything_is_launched_and_goes_back_at_the_end(growth, engines, owner):
    assert engines.asked == {"a"} and growth.lent == [1]
    begin(growth, engines)
    growth.rollout_ends()
    assert engines.done == [JOIN, PART] and engines.asked == {"a"}
    with owner.phase("rollout", step=1) as lease:
        assert lease.nodes == ["r1"]
    assert [name for name, _, _ in engines.noted] == [events.GROWTH, events.PHASE]
    assert growth.metrics["joined_nodes"] == 1 and growth.metrics["grown_node_seconds"] > 0


def test_the_owner_gets_its_node_as_soon_as_what_runs_there_has_gone_elsewhere(growth, engines, owner):
    begin(growth, engines)
    engines.running = {**dict.fromkeys(range(4), "a"), 4: "b", 5: "b"}
    with owner.phase("rollout", step=1) as lease:
        assert engines.awake == {"a"} and engines.asked == {"a"} and set(engines.running.values()) == {"a"}
        assert lease.waited_s < _LIMIT_S
    assert engines.noted[0][1]["requests"] == 2
    # Free again while the rollout goes on: what ends it sooner moves there.
    engines.wait_for("redirect")
    growth.rollout_ends()
    assert engines.done[-1] == PART


def test_a_node_without_which_the_rollout_ends_as_soon_is_not_kept(growth, engines, owner):
    with owner.phase("rollout", step=1):
        growth.nodes_are_held(1)
        growth.engines_are_awake()
        engines.running = {0: "a"}
    engines.wait_for("look")
    growth.rollout_ends()
    assert engines.done == [("look",)]
    with owner.phase("rollout", step=2):
        pass


def test_what_goes_wrong_in_an_engine_ends_the_rollout_and_the_node_stays_the_jobs(growth, engines, pool):
    def fails(unit, lease):
        raise RuntimeError("no weights")

    growth._engines.join = fails
    with pytest.raises(RuntimeError, match="no weights"):
        begin(growth, engines)
    (holder,) = pool.snapshot()["pools"]["rollout"]["nodes"]["r1"]["holders"]
    assert holder["job"] == "grower"


def test_two_hundred_requests_of_the_owner_at_any_moment(growth, engines, owner):
    """Never two on a node; nothing that ran is lost; a rollout's end gives everything back."""
    draw = random.Random(3)
    step = 0
    for turn in range(200):
        if turn % 10 == 0:
            if step:
                growth.rollout_ends()
                assert engines.awake == {"a"}
            step += 1
            growth.nodes_are_held(step)
            engines.running = dict.fromkeys(range(12), "a")
            growth.engines_are_awake()
        threading.Event().wait(draw.choice([0.0, 0.0, 0.001, 0.01]))
        with owner.phase("rollout", step=turn + 1):
            assert engines.awake == {"a"}
            assert len(engines.running) == 12 and set(engines.running.values()) == {"a"}
    growth.rollout_ends()


def served(runs_on):
    """Engines of a manager whose replicas run on these nodes."""
    members, refused = [Member("h", 9, 1, "b")], []
    return SimpleNamespace(
        units=lambda asked: units(runs_on, "abc"[: len(runs_on)], asked), manager=SimpleNamespace(each=lambda *_: members),
        refuse_requests=refused.append, refused=refused, members=members,
    )  # fmt: skip


def test_a_node_that_is_lent_is_the_jobs_until_its_engines_are_gone():
    """As its own nodes are: the client that asks for it names the engines' processes, and fails with the job."""
    engines, noted = served([["r0"], ["r1"]]), []
    names = ("members", "close", "fail")
    client = SimpleNamespace(job="a", **{name: lambda *it, name=name: noted.append((name, *it)) for name in names})
    made = Growth(["r0"], engines, [], Room(100, 64, 10**6), lambda nodes: client)
    assert made.own_nodes == ["r0"] and made.lent == [1]
    assert noted == [("members", engines.members)] and engines.refused == [[OTHER]]
    made.__exit__(KeyError)
    made.__exit__(None)
    assert noted[1:] == [("fail", "its job ended with KeyError"), ("close",)]


def test_a_replica_of_which_the_job_would_own_a_part_is_refused():
    """Its engine would be woken on a node that the job was not given."""
    with pytest.raises(UserError, match="replica 0 runs on r0, r1; allowed: all nodes of a replica, or none"):
        Growth(["r0"], served([["r0", "r1"]]), [], Room(100, 64, 10**6), print)


# ---------------------------------------------------------------- migration

ASKED = "mux.rollout.migration=True"


def tail(gangs, unit_count, workers=(), room=100, policy=None, freed=None) -> TailMigration:
    mux = SimpleNamespace(gangs=lambda phase: gangs)
    engines = SimpleNamespace(
        phases=SimpleNamespace(mux=mux, log=NULL_LOG), refuse_requests=lambda some: None, handle=str.upper,
        vacate=freed.append if freed is not None else print,
    )  # fmt: skip
    named = units([[f"r{at}"] for at in range(unit_count)], "abc"[:unit_count], ASKED)
    return TailMigration(named, engines, workers, Room(room, 8, 10**6), policy or MigrationPolicy())


@pytest.mark.parametrize(("gangs", "done"), [([], 90), ([["r1"]], 79), ([["r1"]], 100)])
def test_no_worker_is_asked_before_it_can_matter(gangs, done):
    assert isinstance(tail(gangs, 2).consider(done, 100), Stay)


def test_the_plans_targets_are_carried_out(monkeypatch):
    """Three units; `a` is emptied, and each of its requests goes where the plan put it."""
    noted, freed = [], []

    def remote(answer):
        return SimpleNamespace(remote=lambda *given: (noted.append(given), answer)[1])

    samples = [RunningSample("g", n, "a", 40, 30, 0.0) for n in range(2)] + [
        RunningSample("h", n, "b", 40, 20, 0.0) for n in range(3)
    ]
    worker = SimpleNamespace(running_samples=remote((samples, 0.01)), evacuate=remote(0))
    monkeypatch.setattr(module.ray, "get", lambda answers: answers)
    policy = MigrationPolicy(threshold=0.5, min_gain_s=0.0, max_slowdown=9.0)
    it = tail([["r0"]], 3, [worker], 1000, policy, freed)
    it.nodes_are_held(1)
    planned = it.consider(90, 100)
    assert isinstance(planned, Migration)
    targets_planned = {("g", int(move.request[-1])): move.target for move in planned.moves}
    assert set(targets_planned.values()) <= {"r1", "r2"}
    names, targets = next(given for given in noted if len(given) == 2)
    assert names == ["a"]
    assert targets == {sample: {"r1": ("b", "B"), "r2": ("c", "C")}[unit] for sample, unit in targets_planned.items()}
    assert [unit.nodes for unit in freed] == [("r0",)]
