"""Jobs and clusters for tests of placement, made by hand or by hypothesis; and what holds for every placement."""

from __future__ import annotations

from hypothesis import strategies as st

from verl_mux.placement import planner
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.model import COLOCATED, SEPARATE, Cluster, Decision, Estimate, Group, JobSpec, NodeKind, Pool
from verl_mux.placement.placer import Move, Placer
from verl_mux.placement.planner import Again, Answer, Arrive, Correct, Leave

CHEAP = NodeKind(name="cheap", usd_per_gpu_hour=1.85, host_memory_gb=1000)
DEAR = NodeKind(name="dear", usd_per_gpu_hour=5.28, host_memory_gb=1000)


def make_job(name: str, rollout: float, train: float, **fields) -> JobSpec:
    return JobSpec(name=name, rollout=Estimate(seconds=rollout), train=Estimate(seconds=train), **fields)


def make_cluster(rollout: int | None = None, train: int | None = None) -> Cluster:
    def pool(name: str, kind: NodeKind, count: int | None) -> Pool:
        return Pool(name=name, kind=kind, nodes=None if count is None else tuple(f"{name}-{i}" for i in range(count)))

    return Cluster(rollout=pool("rollout", CHEAP, rollout), train=pool("train", DEAR, train))


class Planner(planner.Planner):
    """Questions in one word."""

    def admit(self, job: JobSpec, progress: dict | None = None) -> Decision:
        return self.answer(Arrive(job), progress or {}).decision

    def depart(self, name: str, progress: dict | None = None, now: float = 0.0) -> list[Move]:
        return list(self.answer(Leave(name), progress or {}, now).moves)

    def revise(self, job: JobSpec, progress: dict | None = None, now: float = 0.0) -> Answer:
        return self.answer(Correct(job), progress or {}, now)

    def repack(self, progress: dict | None = None, now: float = 0.0) -> list[Move]:
        return list(self.answer(Again(), progress or {}, now).moves)


seconds = st.integers(5, 300).map(float)
EITHER = (SEPARATE, COLOCATED)
ANY_MODES = ((SEPARATE,), (COLOCATED,), EITHER)


@st.composite
def jobs(draw, most: int = 5, nodes: int = 2, modes: tuple[tuple[str, ...], ...] = ((SEPARATE,),)) -> list[JobSpec]:
    """2 to `most` jobs, named in order."""
    drawn = [(draw(st.sampled_from(modes)), draw(st.integers(1, nodes))) for _ in range(draw(st.integers(2, most)))]
    return [
        make_job(
            f"j{i}",
            draw(seconds),
            draw(seconds),
            modes=can,
            rollout_nodes=wide,
            train_nodes=wide if COLOCATED in can else draw(st.integers(1, nodes)),
            rollout_memory_gb=draw(st.sampled_from((100.0, 300.0, 600.0))),
            train_memory_gb=draw(st.sampled_from((100.0, 300.0, 600.0) if SEPARATE in can else (100.0, 300.0))),
            rollout_switch_s=draw(st.sampled_from((0.0, 2.0))),
            train_switch_s=draw(st.sampled_from((0.0, 4.0))),
            sync_s=draw(st.sampled_from((0.0, 1.0))),
            cold_start_s=40.0,
            slo=draw(st.sampled_from((1.0, 1.1, 1.3, 1.6, 2.0))),
        )
        for i, (can, wide) in enumerate(drawn)
    ]


def overfull_nodes(group: Group, cluster: Cluster) -> list[str]:
    """Nodes whose residents' states do not fit in host memory."""
    rollout = {node: sum(j.memory_gb[0] for j in group.on_rollout(node)) for node in group.rollout_nodes}
    train = {node: sum(j.memory_gb[1] for j in group.on_train(node)) for node in group.train_nodes}
    full = [node for node, used in rollout.items() if used > cluster.rollout.kind.host_memory_gb]
    return full + [node for node, used in train.items() if used > cluster.train.kind.host_memory_gb]


def assert_invariants(placer: Placer | Planner) -> None:
    """Those of placement/placer.py, and the books of the pools."""
    placer = placer.placer if isinstance(placer, Planner) else placer
    cluster, groups = placer.cluster, placer.groups.values()
    assert {job.name for group in groups for job in group.jobs} == set(placer.groups.home)
    for at, side in enumerate(("rollout", "train")):
        kind = getattr(cluster, side).kind
        held = [node for group in groups for node in getattr(group, f"{side}_nodes")]
        assert len(held) == len(set(held))
        assert set(held) == placer.groups._pools[at].taken
        assert {node for g in groups for pin in g.pins for node in getattr(pin, side)} == set(held)
        for group in groups:
            for pin in group.pins:
                nodes = getattr(pin, side)
                asked = pin.job.nodes[at]
                spread = side == "train" and getattr(placer.rules, "whole_pool", False) and len(nodes) >= asked
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
            assert (COLOCATED if job.colocated else SEPARATE) in job.modes
            assert not job.colocated or placer.rules.colocate or job.modes == (COLOCATED,)
            assert group_periods(group)[job.name] <= job.limit_s * (1 + 1e-6)
    assert abs(placer.groups.usd_per_hour - sum(group.usd_per_hour(cluster) for group in groups)) < 1e-6
    # Where groups train on their whole pool, the jobs that stay may be left with training nodes that a wider job brought.
    alone = sum(cluster.usd(pin.job.nodes[0], len(pin.train)) for group in groups for pin in group.pins)
    assert placer.groups.usd_per_hour <= alone + 1e-6
