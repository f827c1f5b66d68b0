"""Seconds a weight sync takes between the pools, from a model of the links (fitted to figure 12 of the paper).

Two stages: each training GPU sends its part of the one copy to a rollout GPU over a stream of its own, then the rollout
GPUs broadcast among themselves. The paper's "20 Gbps" between the clusters must be per stream: one shared link of 20 Gbps
could not bring its times.
"""

from __future__ import annotations

import msgspec


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """GB/s. scatter: one stream between the pools.
    broadcast_in: among the GPUs of one rollout node. broadcast_across: as soon as there are several nodes."""

    scatter: float = 18.9 / 8
    broadcast_in: float = 220.0
    broadcast_across: float = 5.95

    def two_stage_s(self, weights_gb: float, streams: int, rollout_nodes: int) -> float:
        broadcast = self.broadcast_in if rollout_nodes == 1 else self.broadcast_across
        return weights_gb / (streams * self.scatter) + weights_gb / broadcast
