"""One end of a job's syncs, over all of them: its sockets, its region, its part. Used by the checkpoint engine and by the
bench."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Sequence
from typing import Protocol

from verl_mux.sync.failure import SyncError
from verl_mux.sync.local import Following
from verl_mux.sync.planning.routes import Meeting, SenderPart, WorkerPart
from verl_mux.sync.progress import Progress
from verl_mux.sync.region import Held
from verl_mux.sync.shard import Shard
from verl_mux.sync.streams.receiving import Receiving
from verl_mux.sync.streams.remote_reads import RemoteReads
from verl_mux.sync.streams.seal import Seal
from verl_mux.sync.streams.sending import Sending, Settings
from verl_mux.sync.streams.transfer_engines import Mooncake, Nixl

# Of 256 ranks with 8 streams each, all at once. The kernel takes no more than its own limit (net.core.somaxconn); the others try
# again after 1, 3, 7, 15... seconds.
_BACKLOG = 2**16 - 1


class Reception(Protocol):
    """How a worker takes one sync."""

    progress: Progress

    def start(self) -> None: ...

    def finish(self) -> dict[str, float]: ...

    def close(self) -> None: ...


def _reads(address: str, settings: Settings) -> RemoteReads | None:
    if settings.transport == "nixl":
        return RemoteReads(Nixl(settings.timeout_s))
    if settings.transport == "mooncake":
        return RemoteReads(Mooncake(address, settings.mooncake_protocol, settings.mooncake_device))
    return None


class End:
    """On a trainer rank or on a rollout worker; which, its part says. A new sync ends one that has been left unfinished.

    Args:
        host: this machine's id, `name`: for people.
        address: of the interface by which others reach it.
    """

    def __init__(self, host: str, name: str, address: str, cluster: str, settings: Settings) -> None:
        self._settings = settings
        self._seal: Seal | None = None
        self._part: SenderPart | WorkerPart | None = None
        self._held = Held()
        self._reads = _reads(address, settings)
        self._now: Sending | Reception | None = None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._remote = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local = f"\0verl_mux_{secrets.token_hex(8)}"
        self._local.bind(local)
        self._local.listen(_BACKLOG)
        self.meeting = Meeting((address, self._remote.getsockname()[1]), local, host, name, cluster)

    def join(self, part: SenderPart | WorkerPart, key: bytes) -> None:
        self._part, self._seal = part, Seal(key)

    def sending(self, shard: Shard, version: int) -> Sending:
        self._end_last()
        part, seal, last = self._part, self._seal, self._now
        assert isinstance(part, SenderPart) and seal is not None
        kept = last.kept if isinstance(last, Sending) else None
        self._now = Sending(shard, part.targets, part.me, version, seal, self._settings, kept, self._reads)
        return self._now

    def receiving(self, version: int) -> Reception:
        self._end_last()
        part, seal = self._part, self._seal
        assert isinstance(part, WorkerPart) and seal is not None
        if self._reads is not None and self._reads.left_open:
            self._held.close()
            self._reads.left_open = False
        found: Reception
        if part.role is None:
            found = Following(part.me, part.follows, part.whom, version, self._held, seal, self._settings.timeout_s)
        else:
            found = Receiving(part.role, version, self._listeners, self._held, seal, self._settings, self._reads)
        self._now = found
        return found

    @property
    def _listeners(self) -> Sequence[socket.socket]:
        return (self._remote, self._local)

    def _end_last(self) -> None:
        if isinstance(self._now, Sending):
            self._now.stop()
        elif self._now is not None:
            with contextlib.suppress(SyncError):
                self._now.close()

    def close(self) -> None:
        self._end_last()
        for listener in self._listeners:
            listener.close()
        if self._reads is not None:
            self._reads.close()
        self._held.close()
