"""Replicas launch behind one gate and move as wholes, on stand-ins of servers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
from verl_mux.memory.moved import Moved
from verl_mux.rollout.engine.replica import InitGate, MuxLLMServerManager, MuxReplica


class Server:
    """Answers as a server on `node`, after it has let others run."""

    def __init__(self, node: str, order: list[str]) -> None:
        self._node, self._order = node, order
        self.sleep = SimpleNamespace(remote=self._move)

    async def _move(self, tags):
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
    moved = manager.move("sleep", ["kv_cache"], ranks)
    assert moved == [(node, {"kv_cache": Moved(1, 0, 0.0)}) for node in nodes]


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
