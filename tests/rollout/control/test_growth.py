"""Engines on nodes that other jobs want now and then, with a running coordinator. On real engines: tests/e2e/growing.py."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest

from verl_mux.coordinator.bus.connect import connect
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.profiling.eventlog import events
from verl_mux.rollout.control import growth as module
from verl_mux.rollout.control.growth import Growth
from verl_mux.rollout.control.growth_plan import GrowthPolicy
from verl_mux.rollout.control.units import Room, Unit
from verl_mux.rollout.messages import RunningSample

OWN, OTHER = Unit(("r0",), (0,), ("a",)), Unit(("r1",), (1,), ("b",))
_LIMIT_S = 20.0


class Engines:
    """Which servers are asked, what runs where, and what was done, in order; as Ray's handles say it."""

    def __init__(self, monkeypatch) -> None:
        self.asked, self.awake, self.done, self.told = {"a", "b"}, {"a"}, [], []
        self.running: dict[int, str] = {}
        self.device, self.changed = threading.RLock(), threading.Condition()
        monkeypatch.setattr(module.ray, "get", lambda answers: answers)
        self.balancer = SimpleNamespace(add_servers=_remote(self._add), remove_servers=_remote(self._remove))
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
        self.told.append((name, extra, step))

    def wait_for(self, verb) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.done and self.done[-1][0] == verb, _LIMIT_S), self.done

    def _do(self, *what) -> None:
        with self.changed:
            self.done.append(what)
            self.changed.notify_all()

    def _add(self, servers) -> None:
        assert set(servers) <= self.awake
        self.asked |= set(servers)

    def _remove(self, servers) -> None:
        self.asked -= set(servers)

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
def growth(pool, engines):
    borrower = connect(pool.address, "grower", {"rollout": ["r1"]}, uid="grower:1", filler=True)
    it = Growth(
        GrowthPolicy(own=["r0"], min_gain_s=0.01), [OWN], [OTHER], [borrower], workers=lambda: [engines.worker],
        balancer=engines.balancer, handles={"a": "A", "b": "B"}, join=engines.join, part=engines.part,
        device=lambda: engines.device, log=engines, room=Room(100, 64, 10**6),
    )  # fmt: skip
    yield it
    it.end(None)


JOIN, PART = ("join", "b"), ("part", "b")


def begin(growth, engines, step=1) -> None:
    growth.ask(step)
    with growth._changed:  # its own engines take longer to wake than an answer
        assert growth._changed.wait_for(lambda: growth._granted, _LIMIT_S)
    growth.open()
    assert engines.done[-1:] == [JOIN] and engines.asked == {"a", "b"}


def test_an_idle_node_is_there_before_anything_is_launched_and_goes_back_at_the_end(growth, engines, owner):
    assert engines.asked == {"a"} and growth.replicas == [1]
    begin(growth, engines)
    growth.close()
    assert engines.done == [JOIN, PART] and engines.asked == {"a"}
    with owner.phase("rollout", step=1) as lease:
        assert lease.nodes == ["r1"]
    assert [name for name, _, _ in engines.told] == [events.GROWTH, events.PHASE]
    assert growth.metrics["joined_nodes"] == 1 and growth.metrics["grown_node_seconds"] > 0


def test_the_owner_gets_its_node_as_soon_as_what_runs_there_has_gone_elsewhere(growth, engines, owner):
    begin(growth, engines)
    engines.running = {**dict.fromkeys(range(4), "a"), 4: "b", 5: "b"}
    with owner.phase("rollout", step=1) as lease:
        assert engines.awake == {"a"} and engines.asked == {"a"} and set(engines.running.values()) == {"a"}
        assert lease.waited_s < _LIMIT_S
    assert engines.told[0][1]["requests"] == 2
    # Free again while the rollout goes on: what ends it sooner moves there.
    engines.wait_for("redirect")
    growth.close()
    assert engines.done[-1] == PART


def test_a_node_without_which_the_rollout_ends_as_soon_is_not_kept(growth, engines, owner):
    with owner.phase("rollout", step=1):
        growth.ask(1)
        growth.open()
        engines.running = {0: "a"}
    engines.wait_for("look")
    growth.close()
    assert engines.done == [("look",)]
    with owner.phase("rollout", step=2):
        pass


def test_what_goes_wrong_in_an_engine_ends_the_rollout_and_the_node_stays_the_jobs(growth, engines, pool):
    def fails(unit, lease):
        raise RuntimeError("no weights")

    growth._join = fails
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
                growth.close()
                assert engines.awake == {"a"}
            step += 1
            growth.ask(step)
            engines.running = dict.fromkeys(range(12), "a")
            growth.open()
        threading.Event().wait(draw.choice([0.0, 0.0, 0.001, 0.01]))
        with owner.phase("rollout", step=turn + 1):
            assert engines.awake == {"a"}
            assert len(engines.running) == 12 and set(engines.running.values()) == {"a"}
    growth.close()
