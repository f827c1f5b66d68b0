"""The certificate: what jobs that share nodes need on each GPU in each phase beside what sleeps, and what lies on the hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from verl_mux.errors import UserError
from verl_mux.memory.certificate import device
from verl_mux.memory.certificate.job import Job
from verl_mux.platform.charges import GB

OTHERS = "others"
PHASES: dict[str, tuple[str, Callable[[Job, int], dict[str, int]]]] = {
    "sync": ("rollout", device.sync),
    "rollout": ("rollout", device.rollout),
    "train": ("train", device.train),
}


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """gpu: bytes of one GPU of the node. host: bytes of its host memory, None: not known. process: of one process on the host."""

    gpu: int
    host: int | None = None
    process: int = 14 * GB


class PhaseBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the job that needs most in it."""

    bytes: dict[str, int]
    total: int
    job: str


class GpuBytes(msgspec.Struct, frozen=True, kw_only=True):
    phases: dict[str, PhaseBytes]
    capacity: int


class HostBytes(msgspec.Struct, frozen=True, kw_only=True):
    """`jobs`: of each job, all kinds together; capacity None: not known."""

    bytes: dict[str, int]
    total: int
    capacity: int | None
    jobs: dict[str, int]


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    active: int


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """`gpus`: by node, of each of its GPUs. `largest_gpu_memory_utilization`: by job, None where none fits. `why_not`: what does
    not fit, in words."""

    fits: bool
    gpus: dict[str, GpuBytes]
    hosts: dict[str, HostBytes]
    per_token_kv_bytes: dict[str, int]
    parameters: dict[str, Parameters]
    largest_gpu_memory_utilization: dict[str, float | None]
    why_not: list[str]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


# By job, phase and kind: bytes on one GPU, as a run measured them.
Measured = Mapping[str, Mapping[str, Mapping[str, int]]]


def certify(
    jobs: Sequence[Job],
    capacities: Mapping[tuple[str, str], Capacity],
    notes: Sequence[str] = (),
    measured: Measured | None = None,
) -> Certificate:
    """`capacities`: by node and side, "rollout" or "train".

    Raises:
        UserError: two jobs of one name.
    """
    if twice := [name for name, count in Counter(job.name for job in jobs).items() if count > 1]:
        raise UserError(f"two of the jobs are called {twice[0]!r}; give each a mux.job of its own")
    nodes = list(dict.fromkeys(node for job in jobs for node in (*job.rollout_nodes, *job.train_nodes)))
    gpus = {node: _gpu(node, jobs, capacities, measured or {}) for node in nodes}
    hosts = {node: _host(node, jobs, capacities) for node in nodes}
    why_not = [*_gpus_too_small(gpus), *_no_room_for_a_request(jobs, capacities), *_hosts_too_small(hosts)]
    return Certificate(
        fits=not why_not,
        gpus=gpus,
        hosts=hosts,
        per_token_kv_bytes={job.name: job.model.kv_values() * job.engine.kv_bytes for job in jobs},
        parameters={job.name: Parameters(total=job.model.total, active=job.model.active_total) for job in jobs},
        largest_gpu_memory_utilization={job.name: _largest(job, jobs, capacities) for job in jobs},
        why_not=why_not,
        notes=list(notes),
    )


def nodes_of(job: Job, side: str) -> tuple[str, ...]:
    return job.rollout_nodes if side == "rollout" else job.train_nodes


def _sides(job: Job, node: str) -> list[str]:
    """The sides on which a job keeps something on this node's GPUs; a colocated job keeps the same on both."""
    sides = [side for side in ("rollout", "train") if node in nodes_of(job, side)]
    return sides[:1] if job.colocated else sides


def _others(job: Job, node: str, jobs: Iterable[Job]) -> int:
    """What all other jobs on this node keep on a GPU while they sleep."""
    kept = (device.kept(other, side) for other in jobs if other is not job for side in _sides(other, node))
    return sum(sum(kinds.values()) for kinds in kept)


def _gpu(node: str, jobs: Sequence[Job], capacities: Mapping[tuple[str, str], Capacity], measured: Measured) -> GpuBytes:
    phases: dict[str, PhaseBytes] = {}
    capacity = None
    for phase, (side, needs) in PHASES.items():
        for job in jobs:
            if node not in nodes_of(job, side):
                continue
            here = capacities[node, side].gpu
            capacity = here if capacity is None else min(capacity, here)
            kinds = {**needs(job, here), **measured.get(job.name, {}).get(phase, {}), OTHERS: _others(job, node, jobs)}
            found = PhaseBytes(bytes=kinds, total=sum(kinds.values()), job=job.name)
            if phase not in phases or phases[phase].total < found.total:
                phases[phase] = found
    assert capacity is not None, f"no phase runs on {node}"
    return GpuBytes(phases=phases, capacity=capacity)


def _host(node: str, jobs: Sequence[Job], capacities: Mapping[tuple[str, str], Capacity]) -> HostBytes:
    """By kind and by job: its processes, and the states that sleep there."""
    kinds: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for job in jobs:
        for side, gpus in (("rollout", job.engine.gpus_per_node), ("train", job.training.gpus_per_node)):
            if node in nodes_of(job, side):
                found = {**host_states(job, side), "processes": capacities[node, side].process * gpus}
                kinds.update(found)
                totals[job.name] += sum(found.values())
    known = [capacities[node, side].host for side in ("rollout", "train") if (node, side) in capacities]
    sizes = [size for size in known if size is not None]
    capacity = min(sizes) if sizes else None
    return HostBytes(bytes=dict(kinds), total=totals.total(), capacity=capacity, jobs=dict(totals))


def host_states(job: Job, side: str) -> dict[str, int]:
    """What sleeps in host memory on each node of a side, "rollout" or "train", by kind."""
    engine, training = job.engine, job.training
    if side == "rollout":
        synced = {"synced": (job.adapter or job.model.total) * engine.bytes}  # the region from which its workers load
        return synced | ({"kept": device.weights(job) * engine.gpus_per_node} if engine.keeps_weights else {})
    states = device.train(job, 0)
    # Each replica of the shards (HSDP) has a copy of its own.
    kinds = {"parameters": states["weights"] * training.gpus_per_node, "optimizer": states["optimizer"] * training.gpus_per_node}
    # What is not sent from the shards is exported before they sleep.
    if training.lora or job.model.experts or training.megatron is not None:
        kinds["exported"] = (job.adapter or job.model.total) * engine.bytes // training.nodes
    return kinds


def _largest(job: Job, jobs: Sequence[Job], capacities: Mapping[tuple[str, str], Capacity]) -> float | None:
    found = [
        device.largest_utilization(job, capacities[node, "rollout"].gpu, _others(job, node, jobs)) for node in job.rollout_nodes
    ]
    shares = [share for share in found if share is not None]
    return min(shares) if len(shares) == len(found) else None


def _gpus_too_small(gpus: Mapping[str, GpuBytes]) -> list[str]:
    return [
        f"{node}: {phase} of {found.job} needs {found.total / GB:.2f} GB on a GPU of {gpu.capacity / GB:.2f} GB"
        for node, gpu in gpus.items()
        for phase, found in gpu.phases.items()
        if found.total > gpu.capacity
    ]


def _no_room_for_a_request(jobs: Sequence[Job], capacities: Mapping[tuple[str, str], Capacity]) -> list[str]:
    found = []
    for job in jobs:
        node = job.rollout_nodes[0]
        cache = device.kv_cache(job, capacities[node, "rollout"].gpu) - device.request_table(job)
        if cache < (needed := device.kv_per_token(job) * job.engine.longest):
            found.append(
                f"{node}: the KV cache of {job.name} has {cache / GB:.2f} GB; one longest response needs {needed / GB:.2f}"
            )
    return found


def _hosts_too_small(hosts: Mapping[str, HostBytes]) -> list[str]:
    return [
        f"{node}: the jobs need {host.total / GB:.0f} GB of host memory, of {host.capacity / GB:.0f} GB"
        for node, host in hosts.items()
        if host.capacity is not None and host.total > host.capacity
    ]
