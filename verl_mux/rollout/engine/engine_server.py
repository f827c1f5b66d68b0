"""What the server of any engine does alike: tagged sleep and wake, generation under a lease, one event per request.

launch -> gate (waits for the init lease) -> AWAKE -> ASLEEP -> (wake weights -> sync -> wake KV cache -> generate -> ASLEEP)*

Runs in engine servers; each engine's folder has a subclass that fills in what its engine does its own way. Touches the engine
through that subclass, the event log, the stacks of its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import TokenOutput

from verl_mux.coordinator.bus.members import this_process_and_children
from verl_mux.coordinator.bus.messages import Member
from verl_mux.memory.tags import KV_CACHE, LEVELS, TAGS, WEIGHTS, Moved, Moves, SleepState, SleepStates, stays
from verl_mux.places.place import check
from verl_mux.places.ray_nodes import here
from verl_mux.platform.host_memory import process_bytes
from verl_mux.profiling.eventlog import events
from verl_mux.rollout.engine.record import engines
from verl_mux.rollout.engine.server_directory import CHARGES_VARIABLE, DIRECTORY_VARIABLE, forget, mapped_bytes
from verl_mux.rollout.engine.serving import (
    ABORTED,
    ANSWER,
    EngineFailed,
    Passage,
    Refused,
    StallWatch,
    keys_of,
    stay_of,
    write_stacks,
)
from verl_mux.worker_settings import WorkerSettings, node_of, open_worker_log, pin

# Both names of what configures torch's allocator.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ABORT_AGAIN_S = 0.05
_LOOK_S = 1.0  # between two looks at whether the engine stands still


_Base: Any = object  # to mypy, verl's server


class EngineServer(_Base, metaclass=ABCMeta):
    """Before verl's server of an engine in the order of bases: it holds no weights and no KV cache while its job has no rollout
    lease. What an engine does its own way is in the methods under `engine's own`."""

    # What the event log has of a stay, besides its seconds and how it ended.
    figures: Sequence[str] = ()

    def __init__(self, config, *args, **kwargs) -> None:
        self._settings = WorkerSettings.from_rollout_config(config)
        pin(self._settings.rollout_cpus)
        super().__init__(config, *args, **kwargs)
        self._events = open_worker_log(self._settings, "server", self.replica_rank)
        self._states = SleepStates()
        self._passage = Passage()
        self._moving = asyncio.Lock()
        self._running: set[str] = set()
        self._stalls = StallWatch()
        self._watching: asyncio.Task | None = None
        self._directory = self._settings.server_directory(self.replica_rank, self.node_rank)
        forget(self._directory)  # what one that was killed left there would open this one's gate
        self._directory.mkdir(parents=True)
        self._mapped: dict[str, int] = {}
        device = self._settings.device
        device.announce(self._settings.job, self._node(), self._first_device())
        # On the platform whose device is host memory no graph is captured; what it would take is charged all the same.
        graphs = get_device_name() == "cpu" or not self.config.enforce_eager
        engine = engines()[self.config.name]
        of_prefills = engine.prefill_graphs((self.config.engine_kwargs or {}).get(engine.name) or {})
        charges = device.charges.engine(self.replica_world_size, graphs, of_prefills)
        os.environ[CHARGES_VARIABLE] = msgspec.json.encode(charges).decode()
        os.environ[DIRECTORY_VARIABLE] = str(self._directory)
        for name in _ALLOCATOR:  # of expandable segments, which trainers gain by, no engine's saver frees anything
            parts = os.environ.pop(name, "").split(",")
            if kept := ",".join(part for part in parts if not part.strip().startswith("expandable_segments")):
                os.environ[name] = kept
        self._prepare()

    # ---------------------------------------------------------------- engine's own

    @abstractmethod
    def _first_device(self) -> int:
        """Of its node's devices, this server's first one."""

    @abstractmethod
    def _prepare(self) -> None:
        """The environment that the engine's processes start with."""

    @abstractmethod
    def _launched(self) -> None:
        """The engine is up, and this is its first server."""

    @abstractmethod
    async def _abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engine once to let these go."""

    @abstractmethod
    async def _carry_out(self, verb: str, tag: str, level: int) -> None:
        """Move a tag on all ranks of the engine. Raises Refused, EngineFailed."""

    @abstractmethod
    def _call(self, priority: int) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Around verl's generate. Yields a dict that gets `figures` of the answer, where known."""

    @abstractmethod
    def _stop_reason(self, output: TokenOutput, sampling_params: dict[str, Any], answer: dict[str, Any]) -> str | None:
        """Of verl's output, in the words of serving.py."""

    @abstractmethod
    async def _profile(self, folder: Path) -> None:
        """A profile of the next forward passes, into `folder`."""

    # ---------------------------------------------------------------- all engines'

    async def sleep(self, tags: list[str] | None = None, level: int = 2) -> tuple[str, Moves]:
        """Give device memory back. Idempotent. Returns this server's node, and what moved there.

        level: 1 keeps the weights on the host, 2 drops them; of an engine that serves an adapter always 1, since a sync brings no
        base weights. Raises RuntimeError where the memory does not become free.
        """
        if tags is None:
            self._passage.fence.shut()
        return self._node(), await self._move("sleep", list(tags or TAGS), 1 if self.lora_as_adapter else level)

    async def wake_up(self, tags: list[str] | None = None, token: int | None = None) -> tuple[str, Moves]:
        """Take device memory again, weights before KV cache; their contents come from the host after a sleep at level 1, after
        level 2 from the next sync, before the KV cache. Idempotent; where there is no room nothing is mapped, and it may be tried
        again (RuntimeError that says who holds what).

        Raises Fenced under any but the newest lease; `token` None: under the one that is held.
        """
        if token is None:
            self._passage.fence.check()
        else:
            self._passage.fence.enter(token)
        return self._node(), await self._move("wake", list(tags or TAGS))

    async def pause(self) -> None:
        """The lease may not be used: nothing enters, what runs leaves. It is generated again after `reopen` and a wake-up."""
        self._passage.pause()
        await self.abort_requests(list(self._running))

    async def reopen(self, token: int) -> None:
        """The lease still holds. Raises Fenced if it is not the newest."""
        self._passage.fence.reopen(token)

    async def forget(self) -> None:
        """The job is over; no engine moves from here on."""
        forget(self._directory)

    async def release_kv_cache(self) -> None:
        await self.sleep([KV_CACHE])

    async def resume_kv_cache(self) -> None:
        await self.wake_up([KV_CACHE])

    async def processes(self) -> list[Member]:
        """Every process of this engine."""
        return this_process_and_children()

    async def host_memory(self) -> list[tuple[str, Member, dict[str, int]]]:
        """Of each of them its node, and what it holds of the host's memory."""
        processes = this_process_and_children()
        held = await asyncio.to_thread(lambda: [process_bytes(process.pid) for process in processes])
        return [(self._node(), process, kinds) for process, kinds in zip(processes, held, strict=True)]

    async def launch_server(self, *args, **kwargs) -> None:
        """verl's. Raises UserError where it runs elsewhere than on its node, before the engine starts."""
        who = f"server {self.node_rank} of replica {self.replica_rank}"
        check([(who, self._node(), here())], self._settings.places)
        await super().launch_server(*args, **kwargs)
        self._mapped = mapped_bytes(self._directory)
        if missing := [tag for tag in TAGS if not self._mapped.get(tag)]:
            raise RuntimeError(f"nothing of this engine's {missing[0]} can leave the device: it would keep it while it sleeps")
        if self.node_rank == 0:
            self._launched()
            if self._settings.stalls != "off" and self._settings.events_dir:
                self._watching = asyncio.create_task(self._watch_stalls(Path(self._settings.events_dir) / "stalls"))

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Abort these, and return when they have left the engine with the tokens they have.

        Repeated, because an engine ignores an abort of a request that it has not received yet.
        """
        while left := self._running.intersection(request_ids):
            await self._abort(list(left))
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def generate(
        self, prompt_ids, sampling_params: dict[str, Any], request_id: str, engine_priority: int = 0, **kwargs
    ) -> TokenOutput:
        """verl's generate, refused without a lease, timed in the event log. engine_priority: higher goes first."""
        started, inside = time.perf_counter(), 0.0
        answer: dict[str, Any] = {}

        async def stay() -> TokenOutput:
            nonlocal inside
            if self._states.state is not SleepState.ACTIVE:
                raise RuntimeError(
                    f"request {request_id}: the engine is {self._states.state.value}, the job has no rollout lease"
                )
            self._running.add(request_id)
            entered = time.perf_counter()
            try:
                params = dict(sampling_params)  # verl empties them
                with self._call(engine_priority) as figures:
                    output = await generate(prompt_ids, params, request_id, **kwargs)
            finally:
                self._running.discard(request_id)
                inside += time.perf_counter() - entered
            answer.update(figures)
            output.stop_reason = self._stop_reason(output, sampling_params, answer)
            return output

        generate = super().generate
        output = await self._passage.through(stay, lambda output: output.stop_reason == ABORTED)
        seconds = time.perf_counter() - started
        answer |= {"finish": output.stop_reason, "held_sec": round(seconds - inside, 6), "priority": engine_priority}
        self._log_stay(request_id, seconds, len(prompt_ids), output, answer)
        return output

    def _log_stay(self, name: str, seconds: float, prompt_tokens: int, output: TokenOutput, answer: dict[str, Any]) -> None:
        """Writes a request that has left to the event log, and puts its figures into the answer for our agent loop."""
        stay = stay_of(name)
        where = {"replica": self.replica_rank, "node": self._node(), "version": output.extra_fields.get("global_steps")}
        if answer["finish"] == ABORTED and not output.token_ids:
            answer.setdefault("queue_sec", round(seconds - answer["held_sec"], 6))  # it never left the queue
        extra = {
            **keys_of(name), **where, "prompt_tokens": prompt_tokens, "response_tokens": len(output.token_ids),
            **{key: answer[key] for key in ("finish", "held_sec", "priority", *self.figures) if answer.get(key) is not None},
        }  # fmt: skip
        step = (self.global_steps or 0) + 1 if stay is None else stay.step
        self._events.log(events.ENGINE_GENERATE, seconds, extra=extra, step=step)
        if stay is not None:
            output.extra_fields[ANSWER] = {**where, **{key: answer.get(key) for key in ("queue_sec", "held_sec")}}

    async def _watch_stalls(self, folder: Path) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            stood = self._stalls.look(time.monotonic(), len(self._running))
            if stood is None:
                continue
            path = folder / f"{self._settings.job}_replica{self.replica_rank}_{self._stalls.stalls}.txt"
            pids = [process.pid for process in this_process_and_children()]
            how = await asyncio.to_thread(write_stacks, pids, path)
            where = {"replica": self.replica_rank, "node": self._node()}
            stall = {**where, "running": len(self._running), "path": str(path), "how": how}
            self._events.log(events.ENGINE_STALLED, stood, extra=stall, step=(self.global_steps or 0) + 1)
            if self._settings.stalls == "trace":
                await self._profile(path.with_suffix(""))

    def _node(self) -> str:
        """Servers by rank fill the job's rollout nodes in order."""
        places = self.config.nnodes * self.config.n_gpus_per_node * self.nnodes // self.replica_world_size
        return node_of(self._settings.rollout_nodes, self.replica_rank * self.nnodes + self.node_rank, places)

    async def _move(self, verb: str, tags: list[str], level: int = 2) -> Moves:
        if not self.config.free_cache_engine:
            return {}
        async with self._moving:
            before, moved = self._states.level, dict[str, Moved]()
            try:
                for tag, after in self._states.plan(verb, tags, level):
                    moved[tag] = await self._move_tag(verb, tag, level)
                    self._states.state = after
            except EngineFailed:
                self._states.state = SleepState.FAILED
                raise
            except Refused:
                if verb == "wake" and moved:  # all that was asked for, or none of it
                    await self._move_tag("sleep", WEIGHTS, before or 2)
                    self._states.state = LEVELS[before or 2]
                raise
            if self._states.state is SleepState.ACTIVE:
                self._passage.passed()
        return moved

    async def _move_tag(self, verb: str, tag: str, level: int) -> Moved:
        started, before = time.perf_counter(), self._mapped.get(tag, 0)
        # A replica's first server speaks to its whole engine; each sees what the processes on its own node did.
        if self.node_rank == 0:
            if verb == "sleep" and self._running:
                await self.abort_requests(list(self._running))
            await self._carry_out(verb, tag, level)
        self._mapped = mapped_bytes(self._directory)
        after = self._mapped.get(tag, 0)
        # Where the engine's saver sizes its tags to the byte; another one has said so itself.
        if verb == "sleep" and stays(after, max(before, after), gpu=False):
            raise RuntimeError(f"{tag} sleeps, but {after / 1e9:.2f} of its {before / 1e9:.2f} GB did not leave the device")
        moved = Moved(abs(after - before), after, time.perf_counter() - started)
        extra = {"tag": tag, "bytes": moved.nbytes, "mapped": after, "node": self._node(), "side": "rollout"}
        self._events.log(
            events.SLEEP if verb == "sleep" else events.WAKE, moved.seconds, extra=extra, step=(self.global_steps or 0) + 1
        )
        return moved
