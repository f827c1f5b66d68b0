"""Two rollout pools beside one training pool, and jobs that may go to either."""

import msgspec

from tests.placement.made_jobs import CHEAP, DEAR
from verl_mux.placement.model import Cluster, Estimate, JobSpec, NodeKind, Pool

SLOW = NodeKind(name="slow", usd_per_gpu_hour=0.5, host_memory_gb=1000)


def clusters(old: int = 2, new: int = 2, train: int = 2) -> dict[str, Cluster]:
    """Two rollout pools beside one training pool."""

    def pool(name: str, kind: NodeKind, count: int) -> Pool:
        return Pool(name=name, kind=kind, nodes=tuple(f"{name}-{i}" for i in range(count)))

    trains = pool("train", DEAR, train)
    return {f"{name}+train": Cluster(rollout=pool(name, kind, count), train=trains)
            for name, kind, count in (("new", CHEAP, new), ("old", SLOW, old))}  # fmt: skip


def on_both(job: JobSpec, longer: float = 1.0) -> dict[str, JobSpec]:
    """longer: how many times as long a rollout takes on the old ones."""
    rollout = Estimate(seconds=job.rollout.seconds * longer)
    return {"new+train": job, "old+train": msgspec.structs.replace(job, rollout=rollout)}
