"""The mark of a job's processes on its hosts."""

from __future__ import annotations

from hashlib import blake2b


def uid_on_hosts(mark: str) -> str:
    """What the job is known by to the coordinator, from the mark of its process on the launcher's machine.

    Another one, so that a coordinator on that machine does not take that process, which ends what is left on the hosts, for one
    of those that have outlived the job.
    """
    return blake2b(mark.encode(), digest_size=16, person=b"verl_mux hosts").hexdigest()
