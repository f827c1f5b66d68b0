"""`verl-mux plan --memory`: the certificate of jobs that are to share nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from verl_mux.coordinator.config import read_config
from verl_mux.coordinator.core.settings import Config, Node
from verl_mux.errors import UserError
from verl_mux.launcher.plan.composed import read_jobs
from verl_mux.memory.certificate.certify import Capacity, Certificate, certify, nodes_of
from verl_mux.memory.certificate.job import Job
from verl_mux.placement.job_needs import GpuKind, find_kind
from verl_mux.platform.charges import GB
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import read_directory

# Of a node that no file describes.
_KINDS = {"rollout": "H20", "train": "H800"}
# Where a run measured what: (side, tag) -> the phases and the kind that it corrects.
_CORRECTED = {
    ("rollout", "weights"): (("sync", "rollout"), "weights"),
    ("rollout", "kv_cache"): (("rollout",), "kv_cache"),
    ("train", "params"): (("train",), "weights"),
    ("train", "optimizer"): (("train",), "optimizer"),
}


def certificate_of(files: list[Path], pools: Path | None, observed: Path | None) -> Certificate:
    """Raises UserError: a file that cannot be read as what it should be, or a node that the pools lack."""
    found = read_jobs(files)
    jobs = [job for job, _ in found]
    config = read_config(pools) if pools is not None else None
    notes: list[str] = []
    capacities = {}
    for job, budget in found:
        for side in ("rollout", "train"):
            for node in nodes_of(job, side):
                capacities[node, side] = _capacity(node, side, job, budget, config, notes)
    measured = _measured(observed, jobs) if observed is not None else {}
    notes += [f"{name}: corrected by what {observed} measured" for name in measured]
    return certify(jobs, capacities, list(dict.fromkeys(notes)), measured)


def _capacity(node: str, side: str, job: Job, budget: float | None, config: Config | None, notes: list[str]) -> Capacity:
    described = config.node(node) if config is not None else None
    if config is not None and described is None:
        raise UserError(f"job {job.name!r}: there is no node {node!r}; there are {config.describe_pools()}")
    if described is not None and config is not None:
        kind, name = _kind_of(described, config, side, notes)
        gpu = described.device_bytes // max(described.gpus, 1) if described.device_bytes else round(kind.memory_gb * GB)
        notes.append(f"{node}: {name}, {gpu / GB:.0f} GB a GPU")
        return Capacity(gpu=gpu, host=described.host_bytes, process=round(kind.process_gb * GB))
    if budget is not None:
        notes.append(f"{node}: {budget:g} GB a GPU, from mux.device.budget of {job.name}")
        return Capacity(gpu=round(budget * GB))
    # One GPU runs both phases of a colocated job.
    name = _KINDS["train" if job.colocated else side]
    kind = find_kind(name, {})
    notes.append(f"{node}: no --pools, so {name} is assumed, {kind.memory_gb:g} GB a GPU")
    return Capacity(gpu=round(kind.memory_gb * GB), process=round(kind.process_gb * GB))


def _kind_of(node: Node, config: Config, side: str, notes: list[str]) -> tuple[GpuKind, str]:
    pool = next(pool for pool in config.pools.values() if node in pool.nodes)
    given = config.placement.kinds if config.placement is not None else {}
    if pool.kind is None:
        notes.append(f"{node.name}: its pool has no kind, so {_KINDS[side]} is assumed")
    name = pool.kind or _KINDS[side]
    return find_kind(name, given), name


def _measured(run: Path, jobs: list[Job]) -> dict[str, dict[str, dict[str, int]]]:
    """From a run's event log: by job, phase and kind the largest number of bytes that a GPU had of each tag."""
    nodes: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    for line in read_directory(run):
        extra = line.extra
        if line.event in (events.SLEEP, events.WAKE) and isinstance(extra.get("mapped"), int):
            key = (line.job, str(extra.get("side")), str(extra.get("tag")), f"{extra.get('node')}/{line.workid}")
            nodes[key] = max(nodes[key], extra["mapped"], extra["bytes"] if isinstance(extra.get("bytes"), int) else 0)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for job in jobs:
        for (side, tag), (phases, kind) in _CORRECTED.items():
            sizes = list(_per_gpu(nodes, job, side, tag))
            for phase in phases if sizes else ():
                found.setdefault(job.name, {}).setdefault(phase, {})[kind] = max(sizes)
    if not found:
        raise UserError(f"--observed {run} holds no sleep or wake of {', '.join(job.name for job in jobs)}")
    return found


def _per_gpu(nodes: dict[tuple[str, str, str, str], int], job: Job, side: str, tag: str) -> Iterator[int]:
    """A server tells of the GPUs of its replica on its node, the trainer of all of a node's."""
    gpus = min(job.engine.gpus, job.engine.gpus_per_node) if side == "rollout" else job.training.gpus_per_node
    return (size // gpus for (name, where, what, _), size in nodes.items() if (name, where, what) == (job.name, side, tag))
