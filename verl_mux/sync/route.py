"""Who sends what to whom: pure planning of the two-stage sync.

Stage 1 crosses the slow link once: trainer rank i sends its own shard to one rollout worker of each cluster, in parallel with the
other ranks. Stage 2 stays inside a cluster: that worker hands every piece on to its peers. Trainer ranks are spread over a
cluster's workers round robin, so min(ranks, workers) streams run at once (RollMux, arXiv 2512.11306, section 5.2).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """A rollout worker: trainers send to `address`, its peers to `handoff`; within `cluster` its links are fast."""

    address: str
    handoff: str
    cluster: str


@dataclass(frozen=True)
class Routes:
    """`entry[i]`: addresses that trainer rank i sends to, one a cluster. `peers[j]`: handoffs that worker j sends to."""

    entry: list[list[str]]
    peers: list[list[str]]


def plan_routes(ranks: int, workers: list[Endpoint]) -> Routes:
    """Routes for `ranks` trainer ranks and the given rollout workers."""
    clusters: dict[str, list[Endpoint]] = {}
    for worker in workers:
        clusters.setdefault(worker.cluster, []).append(worker)
    entry = [[members[rank % len(members)].address for members in clusters.values()] for rank in range(ranks)]
    peers = [[p.handoff for p in clusters[w.cluster] if p.address != w.address] for w in workers]
    return Routes(entry, peers)
