"""What a job's workers need to know of `mux`, carried in verl's extension point `rollout.custom.verl_mux`.

verl hands its rollout config to trainer workers, rollout workers and servers alike, so one channel serves all three. Written by
config/completion.py in the driver, read in every process of the job. `pin` changes the CPUs of the process that calls it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from omegaconf import OmegaConf

from verl_mux.places.place import Place
from verl_mux.platform.charges import DeviceSettings

KEY = "verl_mux"


class WorkerSettings(msgspec.Struct, frozen=True):
    """`uid`: unique to one run of a job. `rollout_cpus`, `train_cpus`: CPUs of a node of this side, where a node names them.

    `events_every`: only steps that are multiples of it are logged; `texts`, `stalls`: see mux.profile.
    `rollout_nodes`, `train_nodes`: names in the order of ranks; `places`: where each of them is.
    `resume`: the folder of the checkpoint that the job goes on from, None: from none.
    `sample_timeout_s`: see mux.rollout. `device`: the keys under mux.device.
    """

    text_chars: ClassVar[int] = 4000

    job: str = "job"
    uid: str = "0"
    seed: int = 0
    seeded_sampling: bool = False
    events_dir: str | None = None
    events_every: int = 1
    texts: float = 0.0
    stalls: str = "off"
    rollout_nodes: tuple[str, ...] = ()
    train_nodes: tuple[str, ...] = ()
    rollout_cpus: tuple[int, ...] = ()
    train_cpus: tuple[int, ...] = ()
    places: dict[str, Place] = {}
    resume: str | None = None
    sample_timeout_s: float | None = None
    device: DeviceSettings = DeviceSettings()

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    @classmethod
    def from_rollout_config(cls, rollout: Mapping | Any) -> WorkerSettings:
        """Read them back from a rollout config, dataclass or mapping; defaults where there are none."""
        custom = rollout.get("custom", None) if hasattr(rollout, "get") else getattr(rollout, "custom", None)
        plain = OmegaConf.to_container(OmegaConf.create({KEY: (custom or {}).get(KEY) or {}}), resolve=True)
        return msgspec.convert(plain[KEY], cls, strict=False)

    def is_bound(self, side: str) -> bool:
        """Have the nodes of this side, "rollout" or "train", hosts?"""
        nodes = self.rollout_nodes if side == "rollout" else self.train_nodes
        return any(node in self.places and self.places[node].host is not None for node in nodes)

    @property
    def directory(self) -> Path:
        """The run's place for files on this host; its servers there make it, and remove it when the job ends."""
        return Path(tempfile.gettempdir()) / f"verl_mux_{self.uid}"

    def server_directory(self, replica: int, node: int) -> Path:
        """Where the processes of one server's node meet: its memory report and the gate of its launch."""
        return self.directory / f"server_{replica}_{node}"


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
