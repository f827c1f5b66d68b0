"""A job's replicas: verl's of any engine, with our server and our rollout worker, and the manager that launches them.

`MuxReplica` and `MuxLLMServerManager` run in the trainer's driver, called by trainer/modes.py and trainer/rollout_engines.py;
`MuxCheckpointEngineWorker` in each rollout worker. Touches the engine servers over Ray, the weight sync, the init lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import pkgutil
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs
from verl.single_controller.ray.base import RayResourcePool, split_resource_pool
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, get_rollout_replica_class

from verl_mux.coordinator.bus.fence import Fence
from verl_mux.coordinator.bus.members import this_process
from verl_mux.coordinator.bus.messages import Member
from verl_mux.errors import Failure
from verl_mux.memory.tags import Moves
from verl_mux.places.place import Location, check
from verl_mux.places.ray_nodes import PlacedPool, here
from verl_mux.platform.charges import charge
from verl_mux.platform.host_memory import process_bytes
from verl_mux.rollout.engine.record import EngineRecord, engines
from verl_mux.rollout.engine.server_directory import open_gate, wait_until_engine_is_at_gate, word_left
from verl_mux.sync.engine import Batch
from verl_mux.worker_settings import WorkerSettings, node_of, pin

# verl's, in a pool of a replica's own: the rollout worker, and room for another.
_PROCESSES_A_GPU = 2
_FORGETS_S = 5.0


class MuxCheckpointEngineWorker(CheckpointEngineWorker):
    """verl's rollout worker, on the node's own CPUs; also the hand on the launch gate of its node."""

    def __init__(self, rollout_config, model_config, **kwargs) -> None:
        settings = WorkerSettings.from_rollout_config(rollout_config)
        pin(settings.rollout_cpus)
        engine, self._replica = engines()[rollout_config.name], int(kwargs.get("replica_rank", 0))
        adapter = pkgutil.resolve_name(engine.adapter)(rollout_config, self._replica) if engine.adapter else None
        super().__init__(rollout_config, model_config, adapter, **kwargs)
        self._fence = Fence()
        self._batch_bytes = int(rollout_config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        self._load = pkgutil.resolve_name(engine.load_weights)
        place, per_node = self.rank + self._replica * self.world_size, int(rollout_config.n_gpus_per_node)
        places = per_node * max(int(rollout_config.nnodes), 1)
        settings.device.announce(settings.job, node_of(settings.rollout_nodes, place % places, places), place % per_node)
        charge(settings.device.charges.worker())
        self._synced: list[Batch] = []
        self._lora: dict[str, Any] | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(
        self,
        global_steps: int | None = None,
        token: int | None = None,
        asleep: Sequence[int] = (),
        lora: dict[str, Any] | None = None,
    ) -> dict[str, float]:
        """In the place of verl's, which hands tensors over on the device; into an engine's memory, so only under the newest lease
        (`token`). Returns the checkpoint engine's figures.

        asleep: replicas whose engines have no memory now. Their workers receive all the same, and their engines map and pin what
        lies in the memory of their hosts: it is there for `load_synced`.
        lora: peft's config of the adapter that arrives, which an engine takes in one piece; None: the whole model arrives.

        Raises Fenced, SyncError.
        """
        self._lora = lora
        most = self._batch_bytes if lora is None else sys.maxsize
        batches = self._noting(self.checkpoint_engine.receive_batches(global_steps, most))
        if self._replica in asleep:
            async for _ in batches:
                pass
            if lora is None:
                shown = [replace(batch, last=batch.first) for batch in self._synced[:1]]
                await self._load(self.server_adapter, _given(shown), None, None)
            return self.checkpoint_engine.figures
        if token is not None:
            self._fence.enter(token)
        await self._load(self.server_adapter, batches, global_steps, lora)
        return self.checkpoint_engine.figures

    async def _noting(self, batches: AsyncGenerator[Batch, None]) -> AsyncGenerator[Batch, None]:
        """They are good until the next sync."""
        self._synced = []
        async with contextlib.aclosing(batches):
            async for batch in batches:
                self._synced.append(batch)
                yield batch

    async def load_synced(self, global_steps: int, token: int) -> None:
        """The weights of the last sync, of this version, into an engine that slept meanwhile. Raises Fenced, SyncError."""
        self._fence.enter(token)
        await self._load(self.server_adapter, _given(self._synced), global_steps, self._lora)

    async def mux_where(self) -> tuple[Location, Member]:
        """Where this worker runs, and as which process."""
        return here(), this_process()

    async def mux_host_memory(self) -> tuple[Member, dict[str, int]]:
        """This process, and what it holds of its host's memory."""
        return this_process(), process_bytes()

    async def wait_until_engine_is_at_gate(self, directory: str) -> None:
        await asyncio.to_thread(wait_until_engine_is_at_gate, Path(directory))

    async def open_gate(self, directory: str) -> None:
        open_gate(Path(directory))

    async def word_left(self, directory: str) -> str | None:
        return word_left(Path(directory))


async def _given(batches: Sequence[Batch]) -> AsyncGenerator[Batch, None]:
    for batch in batches:
        yield batch


class InitGate:
    """All replicas of a job arrive, one init lease is taken, all map their memory and sleep, the lease goes back."""

    def __init__(self, replicas: int, acquire: Callable[[], Any], release: Callable[[Any], None]) -> None:
        self._expected, self._acquire, self._release = replicas, acquire, release
        self._arrived = self._finished = 0
        self._lease: asyncio.Future | None = None

    async def pass_through(self, map_memory: Callable[[], Awaitable[None]]) -> None:
        """Wait for the other replicas and the lease, then run `map_memory`."""
        self._lease = self._lease or asyncio.get_running_loop().create_future()
        self._arrived += 1
        if self._arrived == self._expected:
            try:
                self._lease.set_result(await asyncio.to_thread(self._acquire))
            except Exception as error:  # the others wait for it as well
                self._lease.set_exception(error)
        lease = await self._lease
        try:
            await map_memory()
        finally:
            self._finished += 1
            if self._finished == self._expected:
                await asyncio.to_thread(self._release, lease)


class MuxReplica(RolloutReplica):
    """One engine of a job, before verl's replica in the order of bases (see `replica_class`). It launches up to the gate, maps
    memory under the init lease and sleeps from then on."""

    engine: EngineRecord

    def __init__(
        self, *args, gate: InitGate, runs_on: Sequence[tuple[str, ...]], pools: Sequence[RayResourcePool] | None = None, **kwargs
    ) -> None:
        """`runs_on`: of each replica, by rank, the node of each of its servers; `pools`: their pools (None: verl makes them)."""
        super().__init__(*args, **kwargs)
        self._gate = gate
        self.nodes = runs_on[self.replica_rank]
        self._pool = pools[self.replica_rank] if pools else None
        self._settings = WorkerSettings.from_rollout_config(self.config)
        self.server_class = ray.remote(pkgutil.resolve_name(self.engine.server))

    def rollout_worker_use_gpu(self) -> bool:
        return self._pool is None or self._pool.use_gpu  # Ray's count of GPUs, in which a pool of ours has none

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        return RayClassWithInitArgs(
            cls=ray.remote(MuxCheckpointEngineWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )

    async def init_standalone(self) -> None:
        """On GPUs of its own, wherever Ray finds some, or on those of the pool that is given: on the job's nodes, where these
        have hosts, or the training pool's (mux_colocate).

        All run in verl's STANDALONE mode: weights then have no host backup that every wake would copy to the device only for
        the sync to overwrite it.
        """
        if self._pool is None:
            await super().init_standalone()
        else:
            await super().init_colocated(self._pool)

    async def launch_servers(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        await self._check_workers()
        launch = asyncio.create_task(super().launch_servers())
        gate = asyncio.create_task(self._arrive_at_gate())
        await asyncio.wait({launch, gate}, return_when=asyncio.FIRST_COMPLETED)
        if launch.done():
            gate.cancel()
            await self._launched(launch)
            raise RuntimeError(
                f"{self.engine.name} mapped memory without waiting at its launch gate: is verl_mux's plugin for it loaded?"
            )
        await gate
        await self._gate.pass_through(lambda: self._map_memory_and_sleep(launch))

    async def _arrive_at_gate(self) -> None:
        await asyncio.gather(*[w.wait_until_engine_is_at_gate.remote(d) for w, d in self._gates()])

    async def _check_workers(self) -> None:
        """Raises UserError where they run elsewhere than on their nodes; the server looks for itself."""
        found = await asyncio.gather(*[worker.mux_where.remote() for worker in self.workers])
        who = [f"rollout worker {at} of replica {self.replica_rank}" for at in range(len(found))]
        nodes = [self.nodes[at // self.gpus_per_replica_node] for at in range(len(found))]
        check(zip(who, nodes, [at for at, _ in found], strict=True), self._settings.places)

    async def _map_memory_and_sleep(self, launch: asyncio.Task) -> None:
        await asyncio.gather(*[w.open_gate.remote(d) for w, d in self._gates()])
        await self._launched(launch)
        await self.sleep()

    async def _launched(self, launch: asyncio.Task) -> None:
        """Raises Failure with the word that a process of the engine left, if the engine ended and one did."""
        try:
            await launch
        except RayError as ended:
            words = await asyncio.gather(*[worker.word_left.remote(directory) for worker, directory in self._gates()])
            if left := [word for word in words if word is not None]:
                raise Failure(f"replica {self.replica_rank} could not start: {left[0]}") from ended
            raise

    def _gates(self) -> list[tuple[Any, str]]:
        per_node = self.gpus_per_replica_node
        directories = [str(self._settings.server_directory(self.replica_rank, node)) for node in range(self.nnodes)]
        return [(self.workers[node * per_node], directory) for node, directory in enumerate(directories)]

    async def sleep(self, tags: list[str] | None = None, level: int = 2) -> list[tuple[str, Moves]]:
        """Give the device memory of all tags back. Returns (node, what moved there) of each server."""
        return await self._in_turn([server.sleep for server in self.servers], tags, level)

    async def wake_up(self, tags: list[str] | None = None, token: int | None = None) -> list[tuple[str, Moves]]:
        """Take the device memory of these tags under a lease (None: the one that is held). Returns as `sleep`."""
        return await self._in_turn([server.wake_up for server in self.servers], tags, token)

    async def load_synced(self, version: int, token: int) -> None:
        """The weights of the last sync, of this version, from the memory of the hosts; under this lease."""
        await asyncio.gather(*[worker.load_synced.remote(version, token) for worker in self.workers])

    async def pause(self, level: int) -> list[tuple[str, Moves]]:
        """Nothing is generated and no memory held until `reopen`; see Passage. Returns as `sleep`."""
        await asyncio.gather(*[server.pause.remote() for server in self.servers])
        return await self.sleep(level=level)

    async def reopen(self, token: int) -> None:
        await asyncio.gather(*[server.reopen.remote(token) for server in self.servers])

    async def forget(self) -> None:
        """The job is over: each server removes its files from its host. One that does not answer keeps them."""
        await asyncio.wait([asyncio.ensure_future(server.forget.remote()) for server in self.servers], timeout=_FORGETS_S)

    async def _in_turn(self, moves: list[Any], *arguments: Any) -> list[tuple[str, Moves]]:
        # The first server moves the whole engine; the others then see what happened on their nodes.
        first = await moves[0].remote(*arguments)
        return [first, *await asyncio.gather(*[move.remote(*arguments) for move in moves[1:]])]

    async def processes(self) -> list[Member]:
        """All processes of this replica: of its servers, and its workers."""
        found = await asyncio.gather(*[server.processes.remote() for server in self.servers])
        workers = await asyncio.gather(*[worker.mux_where.remote() for worker in self.workers])
        return [*(process for server in found for process in server), *(process for _, process in workers)]

    async def host_memory(self) -> list[tuple[str, Member, dict[str, int]]]:
        """Of the same processes: node, process, and what it holds of its host's memory."""
        found = await asyncio.gather(*[server.host_memory.remote() for server in self.servers])
        workers = await asyncio.gather(*[worker.mux_host_memory.remote() for worker in self.workers])
        nodes = [self.nodes[at // self.gpus_per_replica_node] for at in range(len(workers))]
        return [*(usage for server in found for usage in server), *((n, *usage) for n, usage in zip(nodes, workers, strict=True))]


def nodes_of_replicas(nodes: Sequence[str], replicas: int, servers: int) -> list[tuple[str, ...]]:
    """Of each replica the node of each of its `servers`: by rank they fill the nodes in order."""
    places = replicas * servers
    return [tuple(node_of(nodes, rank * servers + at, places) for at in range(servers)) for rank in range(replicas)]


def placed_pools(
    settings: WorkerSettings, runs_on: Sequence[tuple[str, ...]], each: int, gpus: int, train_gpus: int
) -> list[RayResourcePool]:
    """Of each replica its pool, `each` of the `gpus` that the rollout has on a node. A job that trains on the node too has the
    node's first GPUs, `train_gpus`, for that."""
    before = dict.fromkeys(settings.train_nodes, train_gpus)
    pools: list[RayResourcePool] = []
    for rank, nodes in enumerate(runs_on):
        at = {node: (settings.places[node], before.get(node, 0) + rank * each % gpus) for node in nodes}
        pools.append(PlacedPool(at, each, _PROCESSES_A_GPU, f"rollout_pool_{rank}"))
    return pools


def replica_class(engine: EngineRecord) -> type:
    """verl's replica of this engine with ours before it."""
    base = get_rollout_replica_class(engine.name)
    return type(f"Mux{base.__name__}", (MuxReplica, base), {"engine": engine})


class MuxLLMServerManager(LLMServerManager):
    """Launches a job's replicas behind one init gate.

    Args:
        acquire, release: take and give back the init lease of the rollout nodes; called from a thread.
        balancer: handle of the load balancer to join (verl's trainer has started one already).
        colocate_with: the training pool, where rollout shares its GPUs.
    """

    def __init__(self, config, *, acquire, release, balancer, colocate_with: RayResourcePool | None = None, **kwargs) -> None:
        self._balancer = balancer
        rollout = config.actor_rollout_ref.rollout
        size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        gpus = colocate_with.world_size if colocate_with else rollout.n_gpus_per_node * rollout.nnodes
        settings = WorkerSettings.from_rollout_config(rollout)
        each = min(rollout.n_gpus_per_node, size)  # of a replica on one of its nodes
        runs_on = nodes_of_replicas(settings.rollout_nodes, gpus // size, size // each)
        pools: list[RayResourcePool] | None = None
        if colocate_with:
            pools = split_resource_pool(colocate_with, split_size=size)
        elif settings.is_bound("rollout"):
            pools = placed_pools(settings, runs_on, each, rollout.n_gpus_per_node, config.trainer.n_gpus_per_node)
        gate = InitGate(gpus // size, acquire, release)
        self.rollout_replica_class = partial(replica_class(engines()[rollout.name]), gate=gate, runs_on=runs_on, pools=pools)
        super().__init__(config, **kwargs)

    async def _init_global_load_balancer(self) -> None:
        self.global_load_balancer = self._balancer
        await self._balancer.add_servers.remote(dict(zip(self.server_addresses, self.server_handles, strict=True)))

    @auto_await
    async def each(self, verb: str, ranks: Sequence[int] | None, *arguments: Any) -> list[Any]:
        """What these replicas (None: all) answer to a method of MuxReplica, one list after the other."""
        replicas = self.rollout_replicas if ranks is None else [self.rollout_replicas[rank] for rank in ranks]
        answers = await asyncio.gather(*[getattr(replica, verb)(*arguments) for replica in replicas])
        return [it for answer in answers for it in answer or ()]
