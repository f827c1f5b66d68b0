"""The job's rollout engines through a step: woken, filled with weights, put to sleep; some of them later or sooner than others.

Runs in the trainer's driver; called by trainer/modes.py and, within a rollout, by trainer/replica_moves.py. Touches the engines
(over Ray), the weight sync, the load balancer's servers and the lease that `Phases` holds.

    begin(version) -> fill -> vacate | join | part of some replicas* -> sleep -> begin(...)
                       '-- pause -> reopen, in the middle of a rollout whose nodes may not be used for a while --'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ray

from verl_mux.coordinator.bus.client import Lease
from verl_mux.profiling.eventlog import events
from verl_mux.rollout.control.replica_plan import Unit, units
from verl_mux.trainer.phases import Phases

_SYNC_FIGURES = (
    "bytes", "ranks", "slow_bytes", "fast_bytes", "local_bytes", "gather_seconds", "send_seconds", "wait_seconds",
    "receive_seconds", "load_seconds", "stream_gb_per_s",
)  # fmt: skip


class RolloutEngines:
    """manager: MuxLLMServerManager. sync: MuxCheckpointManager. sleep_level: "1", "2" or "auto" (`mux.device.sleep_level`).

    The caller of `join`, `part` and `pause` holds `Phases.device`, the lock on the job's devices; `vacate` takes that lock.
    """

    def __init__(self, manager: Any, sync: Any, phases: Phases, sleep_level: str = "auto") -> None:
        self.manager, self._sync, self.phases, self._sleep_level = manager, sync, phases, sleep_level
        self.version = self._step = 0  # of the weights that the rollout uses; of the training
        self.are_awake = False
        self.vacant: set[int] = set()  # replicas that sleep without their weights while the others generate
        self._brought: dict[str, Any] | None = None  # of the sync that brought the first weights to the hosts; then None
        self._on_host: int | None = None  # version of the weights that sleeping engines keep in host memory
        self.sync_figures: dict[str, Any] = {}  # of the latest sync, for verl's metrics

    def bring_to_hosts(self, version: int) -> None:
        """While the job holds no lease: the weights of the first rollout come to the rollout hosts, whose memory for them is made
        and pinned now. For the largest models that takes minutes, in which no other job waits."""
        self.phases.mux.note("weights to the rollout hosts")
        self._brought = self._sync.update_weights(version, None, range(len(self.manager.get_replicas())))

    def begin(self, version: int, step: int, vacant: Iterable[int] = ()) -> None:
        """A rollout with the weights of this version, on all replicas but those that have no nodes (yet)."""
        self.version, self._step, self.vacant = version, step, set(vacant)

    def fill(self) -> None:
        """Memory mapped and filled, in the order in which it is needed; weights that come back from the host need no sync."""
        replicas = self._held()
        self._move("wake", ["weights"], replicas)
        if self._on_host != self.version:
            self._fill_by_sync()
        self._move("wake", ["kv_cache"], replicas)
        self.are_awake, self._on_host = True, None

    def sleep(self, same_weights_next: bool = False) -> None:
        """All engines leave the device; their weights stay in host memory where the next rollout uses the same ones."""
        level = 2 if self.vacant else self._level(same_weights_next)
        self._move("sleep", None, level=level)
        self.are_awake, self._on_host = False, self.version if level == 1 else None

    def pause(self) -> None:
        """Generation stops and the engines sleep, their weights kept in host memory if `mux.device.sleep_level` allows it."""
        level = self._level(same_weights_next=True)
        moved = self.manager.each("pause", self._held(), level)
        self.phases.moved("sleep", "rollout", self._step, moved, log=False)
        self.are_awake, self._on_host = False, self.version if level == 1 else None

    def reopen(self, lease: Lease) -> None:
        """Go on under the same lease; requests that were cut off are generated again from their prompts."""
        self.manager.each("reopen", self._held(), lease.token)
        self.fill()

    def units(self, asked: str) -> list[Unit]:
        """Replicas that come and go together. asked: the `key=value` that needs them, for the message of a UserError."""
        return units([replica.nodes for replica in self.manager.get_replicas()], self.manager.server_addresses, asked)

    def vacate(self, unit: Unit) -> None:
        """These engines are idle for the rest of the rollout: their nodes go back."""
        with self.phases.using():
            self.part(unit)
            self.phases.shrink(list(unit.nodes))

    def part(self, unit: Unit) -> None:
        """Put engines to sleep before the others."""
        self._move("sleep", None, unit.replicas)
        self.vacant.update(unit.replicas)

    def join(self, unit: Unit, lease: Lease) -> None:
        """Wake engines under a lease of their own while the others generate, with the same weights."""
        self._move("wake", ["weights"], unit.replicas, lease=lease)
        self.manager.each("load_synced", unit.replicas, self.version, lease.token)
        self._move("wake", ["kv_cache"], unit.replicas, lease=lease)
        self.vacant.difference_update(unit.replicas)

    def handle(self, server: str) -> Any:
        """Ray's handle of a server, by its name at the load balancer."""
        return dict(zip(self.manager.server_addresses, self.manager.server_handles, strict=True))[server]

    def accept_requests(self, some: Sequence[Unit]) -> None:
        """New requests may go to these engines again."""
        servers = {name: self.handle(name) for unit in some for name in unit.servers}
        ray.get(self.manager.global_load_balancer.add_servers.remote(servers))

    def refuse_requests(self, some: Sequence[Unit]) -> None:
        """No new request goes to these engines."""
        ray.get(self.manager.global_load_balancer.remove_servers.remote([name for unit in some for name in unit.servers]))

    def _held(self) -> list[int] | None:
        """Replicas that the rollout has nodes for; None: all."""
        return [rank for rank in range(len(self.manager.get_replicas())) if rank not in self.vacant] if self.vacant else None

    def _level(self, same_weights_next: bool) -> int:
        """1 keeps the weights in host memory, 2 drops them."""
        return int(self._sleep_level) if self._sleep_level != "auto" else 1 if same_weights_next else 2

    def _fill_by_sync(self) -> None:
        assert self.phases.lease is not None
        with self.phases.part(events.SYNC, self._step, version=self.version) as extra:
            figures, self._brought = self._brought, None
            if figures is not None:
                self.manager.each("load_synced", self._held(), self.version, self.phases.lease.token)
            else:
                figures = self._sync.update_weights(self.version, self.phases.lease.token, self.vacant)
            self.sync_figures = {key: value for key, value in figures.items() if key.startswith("mux/")}
            plain = {name.removeprefix("mux/sync/"): value for name, value in figures.items()}
            extra.update({name: plain.get(name) for name in _SYNC_FIGURES})

    def _move(
        self, verb: str, tags: list[str] | None, replicas: Sequence[int] | None = None, level: int = 2, lease: Lease | None = None
    ) -> None:
        """`lease`: under which they wake; None: the phase's."""
        lease = lease or self.phases.lease
        if verb == "wake":
            moved = self.manager.each("wake_up", replicas, tags, lease.token if lease else None)
        else:
            moved = self.manager.each("sleep", replicas, tags, level)
        self.phases.moved(verb, "rollout", self._step, moved, log=False)
