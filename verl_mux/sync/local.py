"""The weights of a sync at a worker beside the one that receives: it maps the same region, and hears how much of it is there."""

from __future__ import annotations

import threading

import msgspec

from verl_mux.sync.failure import Lost, SyncError
from verl_mux.sync.layout import Entry
from verl_mux.sync.progress import Progress
from verl_mux.sync.region import Held
from verl_mux.sync.streams.connection import Connection, Hello, Kind
from verl_mux.sync.streams.seal import Seal
from verl_mux.sync.streams.sending import said_before


class Following:
    """Made for one sync. `at`: the local address of `whom`, the worker that receives for this host."""

    def __init__(self, me: str, at: str, whom: str, version: int, held: Held, seal: Seal, timeout_s: float) -> None:
        self._hello, self._at, self._whom, self._held = Hello(me, 0, version), at, whom, held
        self._seal, self._timeout_s = seal, timeout_s
        self.progress = Progress()
        self._connection: Connection | None = None
        self._left = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> dict[str, float]:
        self._thread.join()
        return {}

    def close(self) -> None:
        self._left = True
        if self._connection is not None:
            self._connection.shut()
        self._thread.join()

    def _opened(self, connection: Connection) -> None:
        self._connection = connection
        if self._left:
            connection.shut()

    def _run(self) -> None:
        try:
            connection = Connection.to(self._at, self._whom, self._seal, self._hello, self._timeout_s, self._opened)
            try:
                self._follow(connection)
            except Lost as error:
                raise said_before(connection, error) from None
            finally:
                connection.close()
        except SyncError as error:
            self.progress.fail(error)
        except OSError as error:
            self.progress.fail(SyncError(f"the weights of {self._whom} cannot be mapped: {error.strerror}"))

    def _follow(self, connection: Connection) -> None:
        connection.wait_for(Kind.GO)
        while (header := connection.read()).kind != Kind.DONE:
            if header.kind == Kind.ATTACH:
                region = self._held.mapped(connection.take_fd(), header.number)
                entries = msgspec.msgpack.decode(connection.body(header), type=list[Entry])
                self.progress.attach(entries, region)
            elif header.kind == Kind.READY:
                self.progress.advance(header.number)
            else:
                connection.expect_nothing_else(header)
        assert self.progress.layout is not None
        self.progress.advance(len(self.progress.layout.entries), done=True)
