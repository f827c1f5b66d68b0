"""What shared nodes are compared by: USD per hour; by the rule `count_stays` USD for what the jobs would do alone in an hour.

Jobs that take longer on shared nodes stay longer, so in the long run more of them are there at a time, and more nodes. A place
for two at half the price each saves nothing if both take twice as long on it, as on nodes that one of them kept busy.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_mux.placement.model import Cluster, Group, JobSpec
from verl_mux.placement.search.cheapest_nodes import SharedNodes, isolated_usd
from verl_mux.placement.search.rules import Rules
from verl_mux.placement.time.periods import masks, mean_seconds


class Price:
    """In USD per hour."""

    def __init__(self, cluster: Cluster, rules: Rules) -> None:
        self._cluster = cluster
        self._count_stays = rules.count_stays

    def of_group(self, group: Group) -> float:
        usd = group.usd_per_hour(self._cluster)
        if not self._count_stays or len(group.pins) < 2:
            return usd
        # In order of names, as feasibility.py judges: from another start a group may settle otherwise.
        rank = sorted(range(len(group.jobs)), key=lambda i: group.jobs[i].name)
        rollout, train = masks(group)
        jobs = [group.jobs[i] for i in rank]
        return usd * self._slower(jobs, mean_seconds(jobs, [rollout[i] for i in rank], [train[i] for i in rank], group.order))

    def of_shared(self, shared: SharedNodes, seconds: Sequence[float]) -> float:
        """seconds: the mean iteration of each job there."""
        return shared.usd_per_hour * self._slower(shared.jobs, seconds)

    def _slower(self, jobs: Sequence[JobSpec], seconds: Sequence[float]) -> float:
        """By how much the jobs take longer than alone, on the mean by what each costs alone."""
        usd = [isolated_usd(job, self._cluster) for job in jobs]
        if not any(usd):
            usd = [1.0] * len(jobs)  # on nodes that cost nothing they count alike
        return sum(u * s / job.iteration_s for u, s, job in zip(usd, seconds, jobs, strict=True)) / sum(usd)
