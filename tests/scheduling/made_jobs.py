"""Jobs and clusters for tests of placement, made by hand or by hypothesis; and what holds for every placement."""

from __future__ import annotations

from hypothesis import strategies as st

from verl_mux.scheduling.model import Cluster, Estimate, JobSpec, NodeKind, Pool, overfull_nodes
from verl_mux.scheduling.packing import isolated_usd
from verl_mux.scheduling.periods import predict_periods
from verl_mux.scheduling.placer import Placer

CHEAP = NodeKind(name="cheap", usd_per_gpu_hour=1.85, host_memory_gb=1000)
DEAR = NodeKind(name="dear", usd_per_gpu_hour=5.28, host_memory_gb=1000)


def make_job(name: str, rollout: float, train: float, **fields) -> JobSpec:
    return JobSpec(name=name, rollout=Estimate(seconds=rollout), train=Estimate(seconds=train), **fields)


def make_cluster(rollout: int | None = None, train: int | None = None) -> Cluster:
    def pool(name: str, kind: NodeKind, count: int | None) -> Pool:
        return Pool(name=name, kind=kind, nodes=None if count is None else tuple(f"{name}-{i}" for i in range(count)))

    return Cluster(rollout=pool("rollout", CHEAP, rollout), train=pool("train", DEAR, train))


seconds = st.integers(5, 300).map(float)


@st.composite
def jobs(draw, most: int = 5, nodes: int = 2) -> list[JobSpec]:
    """2 to `most` jobs, named in order."""
    return [
        make_job(
            f"j{i}",
            draw(seconds),
            draw(seconds),
            rollout_nodes=draw(st.integers(1, nodes)),
            train_nodes=draw(st.integers(1, nodes)),
            rollout_memory_gb=draw(st.sampled_from((100.0, 300.0, 600.0))),
            train_memory_gb=draw(st.sampled_from((100.0, 300.0, 600.0))),
            rollout_switch_s=draw(st.sampled_from((0.0, 2.0))),
            train_switch_s=draw(st.sampled_from((0.0, 4.0))),
            sync_s=draw(st.sampled_from((0.0, 1.0))),
            cold_start_s=40.0,
            slo=draw(st.sampled_from((1.0, 1.1, 1.3, 1.6, 2.0))),
            owner=draw(st.sampled_from(("ann", "bob"))),
        )
        for i in range(draw(st.integers(2, most)))
    ]


def assert_invariants(placer: Placer) -> None:
    """Those of scheduling/placer.py, and the books of the pools."""
    cluster, groups = placer.cluster, placer.groups.values()
    assert {job.name for group in groups for job in group.jobs} == set(placer.placement.home)
    for side in ("rollout", "train"):
        kind = getattr(cluster, side).kind
        held = [node for group in groups for node in getattr(group, f"{side}_nodes")]
        assert len(held) == len(set(held))
        assert set(held) == getattr(placer.placement, f"_{side}").taken
        assert {node for g in groups for pin in g.pins for node in getattr(pin, side)} == set(held)
        for group in groups:
            for pin in group.pins:
                nodes = getattr(pin, side)
                asked = getattr(pin.job, f"{side}_nodes")
                # In the paper every job of a group trains on all of its training nodes.
                spread = side == "train" and placer.rules.whole_pool and len(nodes) >= asked
                assert len(set(nodes)) == len(nodes) and (len(nodes) == asked or spread)
                assert set(nodes) <= set(getattr(group, f"{side}_nodes"))
        assert kind.usd_per_hour == kind.gpus * kind.usd_per_gpu_hour
    for group in groups:
        assert len(group.pins) <= placer.rules.cap
        assert not overfull_nodes(group, cluster)
        prices = [cluster.rollout.kind.usd_per_hour for _ in group.rollout_nodes]
        prices += [cluster.train.kind.usd_per_hour for _ in group.train_nodes]
        assert abs(group.usd_per_hour(cluster) - sum(prices)) < 1e-6
        for job in group.jobs:
            assert predict_periods([group])[job.name].mean_s <= job.limit_s * (1 + 1e-6)
    alone = sum(isolated_usd(job, cluster) for group in groups for job in group.jobs)
    assert placer.placement.usd_per_hour <= alone + 1e-6
