"""Each connection costs the coordinator an open file: how many it may have is the limit of its clients."""

from __future__ import annotations

import resource

# For the journal, the log, and looking at processes.
_OURS = 200
# More would be of no use, and a limit of infinity cannot be counted with.
_ENOUGH = 2**18


def clients_allowed() -> int:
    """Raises the process's limit as far as it may; returns how many clients and drivers of jobs that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return allowed - _OURS
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed - _OURS
