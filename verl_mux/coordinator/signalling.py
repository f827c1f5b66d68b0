"""Ending processes of a dead job, and nobody else's.

Which processes a job has is what its messages say, and anybody may send a message. So a process is ended only if it proves
that it belongs to the job: it was started with the job's uid in VERL_MUX_JOB_UID, and it runs as the user that this
process runs as. The uid is a secret of the job: no output shows it, and /proc shows it to the same user alone.
"""

from __future__ import annotations

import contextlib
import os

import psutil

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus.messages import Member


def kill(member: Member, uid: str, was_marked: bool = False) -> bool:
    """SIGKILL for exactly this process, if it is one of the job with that uid. False: it is not, or it is gone.

    `was_marked`: whoever calls has read that uid from it before; it may have written a title over its environment since.
    """
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(member.pid)  # from here on psutil notices when the pid becomes another process's
        if members.is_here(member) and members.is_alive(member) and _belongs(process, uid, was_marked):
            members.end(process)
            return True
    return False


def _belongs(process: psutil.Process, uid: str, was_marked: bool) -> bool:
    """Raises psutil.Error where this user may not look, which says enough."""
    family = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    same_user = set(process.uids()) == {os.getuid()}
    mark = process.environ().get(members.UID_VARIABLE) or (uid if was_marked else "")
    return bool(uid) and same_user and process.pid not in family and mark == uid
