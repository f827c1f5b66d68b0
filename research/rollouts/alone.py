"""One virtual job alone on a pool."""

from __future__ import annotations

from research.rollouts.bed import Bed
from research.rollouts.engine import Key, Replica, Request
from research.rollouts.job import VirtualJob


def rollout_seconds(job: VirtualJob, bed: Bed) -> float:
    """Seconds that the rollouts of all its steps take; training takes none here: every mode trains the same tokens."""
    replicas = [Replica(bed) for _ in range(bed.replicas)]

    def submit(request: Request) -> None:
        min(replicas, key=lambda replica: replica.requests).submit(request)

    def abort(key: Key) -> int | None:
        return next((total for replica in replicas if (total := replica.abort(key)) is not None), None)

    job.submit, job.abort = submit, abort
    now = 0.0
    while not job.over:
        job.begin()
        while not job.finished:
            now = min(replica.next_end() for replica in replicas)
            for request in [request for replica in replicas for request in replica.advance(now)]:
                job.ended(request)
    return now
