"""Replicas launch behind one gate and move as wholes, on stand-ins of servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
from ray.exceptions import ActorDiedError

from verl_mux.coordinator.bus.fence import Fence, Fenced
from verl_mux.errors import Failure, UserError
from verl_mux.memory.tags import Moved
from verl_mux.places.place import Location, Place
from verl_mux.rollout.engine import replica as replica_module
from verl_mux.rollout.engine.replica import InitGate, MuxLLMServerManager, MuxReplica, nodes_of_replicas, placed_pools
from verl_mux.sync.engine import Batch
from verl_mux.worker_settings import WorkerSettings


class Server:
    """Answers as a server on `node`, after it has let others run."""

    def __init__(self, node: str, order: list[str]) -> None:
        self._node, self._order = node, order
        self.sleep = SimpleNamespace(remote=self._move)

    async def _move(self, tags, level):
        self._order.append(f"{self._node} begins")
        await asyncio.sleep(0)
        self._order.append(f"{self._node} ends")
        return self._node, {tag: Moved(1, 0, 0.0) for tag in tags}


def replica(*nodes: str) -> tuple[MuxReplica, list[str]]:
    made, order = object.__new__(MuxReplica), []
    made.servers = [Server(node, order) for node in nodes]
    return made, order


def test_the_first_server_moves_the_engine_before_the_others_look_at_their_nodes():
    made, order = replica("r0", "r1", "r2")
    moved = asyncio.run(made.sleep(["weights"]))
    assert [node for node, _ in moved] == ["r0", "r1", "r2"] and order[:2] == ["r0 begins", "r0 ends"]


@pytest.mark.parametrize(("ranks", "nodes"), [(None, ["r0", "r1", "r2"]), ([1], ["r2"])])
def test_replicas_move_all_or_by_rank_and_each_server_tells_its_figures(ranks, nodes):
    manager = object.__new__(MuxLLMServerManager)
    manager.rollout_replicas = [replica("r0", "r1")[0], replica("r2")[0]]
    moved = manager.each("sleep", ranks, ["kv_cache"], 2)
    assert moved == [(node, {"kv_cache": Moved(1, 0, 0.0)}) for node in nodes]


@pytest.mark.parametrize("first", ["answers", "is dead", "never answers"])
def test_each_server_removes_its_files_whatever_another_does(monkeypatch, first):
    async def answers():
        if first == "is dead":
            raise ActorDiedError
        if first == "never answers":
            await asyncio.Event().wait()

    async def removes():
        removed.append("r1")

    removed, made = [], object.__new__(MuxReplica)
    monkeypatch.setattr(replica_module, "_FORGETS_S", 0.01)
    made.servers = [SimpleNamespace(forget=SimpleNamespace(remote=remote)) for remote in (answers, removes)]
    asyncio.run(made.forget())
    assert removed == ["r1"]


@pytest.mark.parametrize(
    ("nodes", "replicas", "servers", "expected"),
    [
        (["r0", "r1"], 2, 1, [("r0",), ("r1",)]),
        (["r0", "r1"], 4, 1, [("r0",), ("r0",), ("r1",), ("r1",)]),
        (["r0", "r1", "r2", "r3"], 2, 2, [("r0", "r1"), ("r2", "r3")]),
        (["r0"], 2, 1, [("r0",), ("r0",)]),
    ],
)
def test_replicas_fill_nodes_in_order(nodes, replicas, servers, expected):
    assert nodes_of_replicas(nodes, replicas, servers) == expected


def launching(nodes: tuple[str, ...], hosts: list[str]) -> MuxReplica:
    """A replica of one worker a node, whose nodes lie on the hosts of their names, and whose workers run on these."""
    made = object.__new__(MuxReplica)
    made.replica_rank, made.gpus_per_replica_node, made.nodes = 3, 1, nodes
    made._settings = WorkerSettings(places={node: Place(host=f"host-{node}") for node in nodes})

    def worker(host: str, number: int):
        async def where():
            return Location(host), f"worker {number}"

        async def processes():
            return [f"server {number}"]

        return SimpleNamespace(mux_where=SimpleNamespace(remote=where), processes=SimpleNamespace(remote=processes))

    made.workers = made.servers = [worker(host, number) for number, host in enumerate(hosts)]
    return made


def test_no_server_is_launched_where_a_worker_runs_elsewhere():
    with pytest.raises(UserError, match=r"worker 1 of replica 3 works for node 'r1' \(host host-r1\), but runs on host-r0"):
        asyncio.run(launching(("r0", "r1"), ["host-r0", "host-r0"]).launch_servers())


def test_an_engine_that_ends_as_it_starts_is_told_with_the_word_that_it_left(monkeypatch):
    made = launching(("r0",), ["host-r0"])
    made.nnodes, made.engine, made.rollout_mode = 1, SimpleNamespace(name="sglang"), None

    async def died(self):
        raise ActorDiedError

    async def never(directory):
        await asyncio.Event().wait()

    async def left(directory):
        return f"no room, in {Path(directory).name}"

    monkeypatch.setattr(replica_module.RolloutReplica, "launch_servers", died)
    made.workers[0].wait_until_engine_is_at_gate = SimpleNamespace(remote=never)
    made.workers[0].word_left = SimpleNamespace(remote=left)
    with pytest.raises(Failure, match="replica 3 could not start: no room, in server_3_0"):
        asyncio.run(made.launch_servers())


def test_a_replicas_processes_are_its_servers_and_its_workers_which_run_on_its_nodes():
    made = launching(("r0", "r1"), ["host-r0", "host-r1"])
    asyncio.run(made._check_workers())
    found = asyncio.run(made.processes())
    assert found == ["server 0", "server 1", "worker 0", "worker 1"]


class TestInitGate:
    def test_all_replicas_map_memory_under_one_lease_that_goes_back_after_the_last(self):
        told = []
        gate = InitGate(2, lambda: told.append("acquire") or "lease", lambda lease: told.append(f"release {lease}"))

        async def map_memory():
            told.append("map")

        async def launch():
            await asyncio.gather(*[gate.pass_through(map_memory) for _ in range(2)])

        asyncio.run(launch())
        assert told == ["acquire", "map", "map", "release lease"]

    def test_a_lease_that_is_not_given_ends_all_of_them(self):
        def refuse():
            raise RuntimeError("refused")

        async def launch():
            gate = InitGate(2, refuse, lambda lease: None)
            return await asyncio.gather(*[gate.pass_through(asyncio.Event().wait) for _ in range(2)], return_exceptions=True)

        assert [str(error) for error in asyncio.run(launch())] == ["refused", "refused"]


def worker_of(replica, calls):
    """A rollout worker whose checkpoint engine receives three batches, and whose engine notes what it loads."""

    async def load(adapter, batches, version, lora):
        calls.append(([batch async for batch in batches], version, lora))

    async def receive(version, nbytes):
        for at in range(3):
            yield Batch(version, nbytes, at, at + 1)

    worker = object.__new__(replica_module.MuxCheckpointEngineWorker)
    worker._fence, worker._batch_bytes, worker._load, worker._replica = Fence(), 256, load, replica
    worker.checkpoint_engine = SimpleNamespace(receive_batches=receive, figures={"mux/sync/seconds": 1.0})
    worker.server_adapter = "adapter"
    return worker


def synced(version):
    return ([Batch(version, 256, at, at + 1) for at in range(3)], version, None)


def test_a_sync_goes_to_the_engine_by_batches_under_the_newest_lease():
    calls = []
    worker = worker_of(0, calls)
    assert asyncio.run(worker.update_weights(3, token=2)) == worker.checkpoint_engine.figures
    assert calls == [synced(3)]
    with pytest.raises(Fenced):
        asyncio.run(worker.update_weights(4, token=1))
    assert len(calls) == 1


def test_an_engine_that_sleeps_gets_the_weights_later_from_its_host_under_a_lease_of_its_own():
    calls = []
    worker = worker_of(1, calls)
    asyncio.run(worker.update_weights(3, token=2, asleep=[1]))
    assert calls == [([Batch(3, 256, 0, 0)], None, None)]  # the memory alone, to map and pin
    calls.clear()
    for _ in range(2):  # it may sleep and come back within a rollout
        asyncio.run(worker.load_synced(3, token=5))
    assert calls == [synced(3)] * 2
    asyncio.run(worker.update_weights(4, token=5, asleep=[1], lora={"r": 4}))
    asyncio.run(worker.load_synced(4, token=6))
    (received, *_), *rest = calls.pop()
    assert received.region > 1 << 60 and rest == [4, {"r": 4}], "an engine takes an adapter whole"
    with pytest.raises(Fenced):
        asyncio.run(worker.load_synced(3, token=4))


def test_replicas_on_a_node_have_gpus_of_their_own_behind_those_that_the_job_trains_on():
    places = {node: Place(host=node) for node in ("n0", "n1")}
    settings = WorkerSettings(train_nodes=("n1",), places=places)
    pools = placed_pools(settings, [("n0",), ("n0",), ("n1",), ("n1",)], each=2, gpus=4, train_gpus=3)
    assert [pool._nodes for pool in pools] == [
        {"n0": (places["n0"], 0)}, {"n0": (places["n0"], 2)}, {"n1": (places["n1"], 3)}, {"n1": (places["n1"], 5)},
    ]  # fmt: skip
    (wide,) = placed_pools(settings, [("n0", "n1")], each=4, gpus=4, train_gpus=3)
    assert [first for _, first in wide._nodes.values()] == [0, 3] and wide.store == [4, 4]
