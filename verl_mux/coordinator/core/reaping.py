"""What to do about the processes of a silent or dying job. Pure: given what is alive, says what to wait for or kill."""

from __future__ import annotations

from typing import NamedTuple

from verl_mux.coordinator.bus.messages import Member
from verl_mux.coordinator.core.records import Job, JobState
from verl_mux.coordinator.core.settings import Config


class Verdict(NamedTuple):
    """`gone`: nothing of a dying job is left. `waits_for`: processes in words. `kill`: those to end now."""

    gone: bool
    waits_for: list[str]
    kill: list[Member]


def judge(job: Job, alive: list[Member], host: str, config: Config, now: float) -> Verdict:
    """`alive`: its living processes on `host`, which is the only one that can be looked at.

    Processes elsewhere count as alive until `remote_grace` is over, the driver also until its starter says it exited.
    """
    died_at = job.died_at if job.state is JobState.DYING else None
    away = [member for member in dict.fromkeys([job.driver, *job.members]) if member.host != host]
    if job.told:
        away = [member for member in away if member != job.driver]
    if died_at is not None and config.remote_grace is not None and now - died_at > config.remote_grace:
        away = []
    words = [f"pid {member.pid}" for member in alive]
    words += [f"pid {member.pid} on {member.host} (not visible from {host})" for member in away]
    # A filler was told to leave, or its driver is dead: it has had its time, and a job may wait.
    grace = 0.0 if job.filler else config.kill_grace
    overdue = died_at is not None and now - died_at > grace
    # Who registered may itself be a worker (a Ray actor, say) of what the starter saw end; the starter's word counts.
    over = job.told or job.condemned or job.driver not in alive
    kill = alive if config.kill and overdue and over else []
    return Verdict(died_at is not None and not alive and not away, words, kill)
