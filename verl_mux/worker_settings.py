"""What a job's workers need to know of `mux`, carried in verl's extension point `rollout.custom.verl_mux`.

verl hands its rollout config to trainer workers, rollout workers and servers alike, so one channel serves all three.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.places.place import Place
from verl_mux.platform.charges import DeviceSettings

KEY = "verl_mux"


@dataclass(frozen=True)
class WorkerSettings:
    """`uid`: unique to one run of a job. `cpus`: CPUs of a node by side ("rollout", "train"), where a node names them.

    `events_every`: only steps that are multiples of it are logged; `texts`, `text_chars`, `stalls`, `tables`: see mux.profile.
    `nodes`: names by side, in the order of ranks; `places`: where each of them is.
    `resume`: the folder of the checkpoint that the job goes on from, None: from none.
    `device`: the keys under mux.device.
    """

    job: str = "job"
    uid: str = "0"
    seed: int = 0
    seeded_sampling: bool = False
    events_dir: str | None = None
    events_every: int = 1
    texts: float = 0.0
    text_chars: int = 4000
    stalls: str = "off"
    tables: int = 0
    rollout_nodes: tuple[str, ...] = ()
    train_nodes: tuple[str, ...] = ()
    rollout_cpus: tuple[int, ...] = ()
    train_cpus: tuple[int, ...] = ()
    places: Mapping[str, Place] = field(default_factory=dict)
    resume: str | None = None
    device: DeviceSettings = DeviceSettings()

    def to_dict(self) -> dict[str, Any]:
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        places = {node: msgspec.structs.asdict(place) for node, place in self.places.items()}
        return {**plain, "places": places, "device": msgspec.to_builtins(self.device)}

    def server_directory(self, replica: int, node: int) -> Path:
        """Where the processes of one server's node meet: its memory report and the gate of its launch."""
        return self.directory / f"server_{replica}_{node}"

    def is_bound(self, side: str) -> bool:
        """Have the nodes of this side, "rollout" or "train", hosts?"""
        nodes = self.rollout_nodes if side == "rollout" else self.train_nodes
        return any(node in self.places and self.places[node].host is not None for node in nodes)

    @property
    def directory(self) -> Path:
        """The run's place for such files on this host; removed when the job ends."""
        return Path(tempfile.gettempdir()) / f"verl_mux_{self.uid}"

    @classmethod
    def from_rollout_config(cls, rollout: Mapping | Any) -> WorkerSettings:
        """Read them back from a rollout config, dataclass or mapping; defaults where there are none."""
        custom = rollout.get("custom", None) if hasattr(rollout, "get") else getattr(rollout, "custom", None)
        given: dict[str, Any] = dict((custom or {}).get(KEY) or {})
        for key, value in given.items():
            given[key] = tuple(value) if isinstance(value, (list, tuple)) else value
        places = given.get("places") or {}
        device = msgspec.convert(_plain(given.get("device") or {}), DeviceSettings, strict=False)
        return cls(**{**given, "places": {node: _place(dict(place)) for node, place in places.items()}, "device": device})


def _plain(given: Mapping | Any) -> dict[str, Any]:
    """Without the mappings of OmegaConf."""
    return {
        key: _plain(value) if isinstance(value, Mapping) or hasattr(value, "items") else value for key, value in given.items()
    }


def _place(plain: dict[str, Any]) -> Place:
    lists = {key: list(plain[key]) for key in ("gpu_ids", "cpus") if plain[key] is not None}
    return Place(host=plain["host"], **lists)


def node_of(nodes: Sequence[str], place: int, places: int) -> str:
    """The node of one place: `places` GPUs, ranks or servers fill the nodes in order, as many on each."""
    return nodes[place * len(nodes) // places]


def pin(cpus: tuple[int, ...]) -> None:
    """Keep every thread of this process, and the children it will have, on the CPUs that its node names. No CPUs: anywhere."""
    if not cpus:
        return
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cpus)
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))


def open_worker_log(settings: WorkerSettings, role: str, worker: int):
    """This worker's event log, or the log that keeps nothing."""
    from verl_mux.profiling.eventlog.log import NULL_LOG, EventLog

    if not settings.events_dir:
        return NULL_LOG
    return EventLog(
        settings.events_dir, worker=worker, role=role, job=settings.job, every=settings.events_every, run=settings.uid[:8]
    )
