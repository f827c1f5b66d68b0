"""Which fillers have been told to leave, and since when. Pure, and not remembered across a restart: nobody is late for what a
coordinator that is no more may have told him.
"""

from __future__ import annotations

from collections.abc import Iterable

from verl_mux.coordinator.core.inputs_and_instructions import JobEvicted, What
from verl_mux.coordinator.core.records import Job, JobState, Lease, State
from verl_mux.coordinator.core.settings import FILLER_GRACE_S, Config


class Calls:
    """Leases that were called back, by token. Times in the running time of the coordinator."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def __bool__(self) -> bool:
        """Whether anybody is still to leave."""
        return bool(self._since)

    def tell(self, job: Job, leases: Iterable[Lease], running: float) -> None:
        """The filler is told now which of its nodes jobs wait for: `job.contended`. `leases`: its own."""
        for lease in leases:
            if set(lease.nodes).isdisjoint(job.contended):
                self._since.pop(lease.token, None)
            else:
                self._since.setdefault(lease.token, running)

    def left(self, token: int, running: float) -> float | None:
        """Seconds that it took to leave; None: nobody had told it to."""
        since = self._since.pop(token, None)
        return None if since is None else running - since

    def slow_to_leave(self, state: State, config: Config, running: float) -> list[What]:
        """What ends the jobs that should have left by now."""
        self._since = {token: since for token, since in self._since.items() if token in state.leases}
        late = {}
        for token, since in self._since.items():
            job = state.jobs[state.leases[token].job]
            if running - since > grace_of(job, config) and job.state in (JobState.LIVE, JobState.SILENT):
                late[job.name] = job
        reason = "a job waited for what it held, and it had not left after {:g} s"
        return [JobEvicted(job=it.name, uid=it.uid, reason=reason.format(grace_of(it, config))) for it in late.values()]


def grace_of(job: Job, config: Config) -> float:
    """Seconds that a filler has to leave."""
    return max(FILLER_GRACE_S, min(job.grace, config.lease_timeout))
