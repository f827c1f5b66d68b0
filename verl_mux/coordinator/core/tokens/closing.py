"""What became of a job's tokens, so that a release is answered the same however often it is sent. Pure.

A release says that nothing is done under its token any more. That is true whoever hears it, so a token that nobody remembers
counts as given back; only one that was taken away, or is another job's, is answered with LEASE_LOST. A request that comes
once more after its lease was given back, late from an old connection, is not granted again.
"""

from __future__ import annotations

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.records import Job

# The last ones of a job: more than it can have releases open.
_REMEMBERED = 64


def given_back(job: Job, token: int) -> None:
    _remember(job, token, taken_away=False)


def lost(job: Job, token: int) -> None:
    _remember(job, token, taken_away=True)


def spent(job: Job, key: str) -> None:
    """What was asked for under this key was given back or cancelled."""
    job.spent.append(key)
    del job.spent[:-_REMEMBERED]


def is_closed(job: Job, token: int) -> bool:
    return token in job.closed


def answer(job: Job, token: int, is_anothers: bool) -> m.LeaseReleased | m.LeaseLost:
    """To the release of a token that the job does not hold."""
    if is_anothers or job.closed.get(token):
        return m.LeaseLost(token=token, reason=f"token {token} is stale: the lease was taken away before its release")
    given_back(job, token)  # a claim that comes later, from before the release, must not bring it back
    return m.LeaseReleased(token=token)


def _remember(job: Job, token: int, taken_away: bool) -> None:
    job.closed[token] = taken_away
    while len(job.closed) > _REMEMBERED:
        del job.closed[next(iter(job.closed))]
