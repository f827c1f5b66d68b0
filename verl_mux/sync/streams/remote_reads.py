"""Pieces that who receives reads out of the sender's memory, by RDMA, instead of taking them from the socket.

A transfer engine reads (transfer_engines.py). Frames go over the socket as ever, sealed, with the piece's digest; in place of the
bytes they say where these lie. Nobody writes into somebody else's memory, so nothing that is late can spoil a sync that came
after.

    sender: a piece into a slot --> frame: where it lies -->        receiver: reads it into the region, checks it
            slot free again <-------------------- TAKEN <--

Who hands on needs no slots: what it hands on lies in its region until the sync is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence

import msgspec
import numpy as np

from verl_mux.sync.failure import Lost, SyncError
from verl_mux.sync.region import Region
from verl_mux.sync.streams.connection import Connection, Header, Kind
from verl_mux.sync.streams.transfer_engines import Run, TransferEngine, address_of

# `encoding` of a piece, beside those of delta.py.
READ = 2
# Pieces that a stream offers before it hears that the first was taken.
_AHEAD = 2


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """Where a piece lies: (address, bytes) one after the other, in what the engine of `session` has registered."""

    session: bytes
    places: list[tuple[int, int]]


class RemoteReads:
    """What this process has registered with its engine, kept over syncs. Thread-safe. `left_open`: a read was given up, and may
    write into the region yet."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._slots: dict[Hashable, np.ndarray] = {}
        self._region: tuple[Region, np.ndarray] | None = None
        self.left_open = False

    def hold(self, region: Region) -> None:
        """The region that is read into and handed on from; the one before is let go."""
        with self._lock:
            if self._region is not None and self._region[0] is region:
                return
            if self._region is not None:
                self._engine.unregister(self._region[1])
            whole = np.frombuffer(region.view, np.uint8) if region.nbytes else np.empty(1, np.uint8)
            self._engine.register(whole)
            self._region = region, whole

    def slots(self, whose: Hashable, nbytes: int) -> list[np.ndarray]:
        """As many as may be offered at once, of `nbytes` each; the same ones in every sync."""
        with self._lock:
            kept = self._slots.get(whose)
            if kept is None or len(kept) < _AHEAD * nbytes:
                if kept is not None:
                    self._engine.unregister(kept)
                kept = self._slots[whose] = np.empty(_AHEAD * nbytes, np.uint8)
                self._engine.register(kept)
            return np.split(kept[: _AHEAD * nbytes], _AHEAD)

    def offer(self, views: Sequence[np.ndarray]) -> bytes:
        """What the other end needs to read these, which have to be registered and to stay as they are until it has."""
        return msgspec.msgpack.encode(Offer(self._engine.session, [(address_of(view), view.nbytes) for view in views]))

    def read(self, whom: str, body: bytes, views: Sequence[memoryview], is_over: Callable[[], bool]) -> None:
        """What was offered into these, which lie in the region. `is_over`: nobody needs it any more.

        Raises:
            SyncError: as much was not offered.
            Lost: it cannot be read, not within the engine's time limit, or it is over.
        """
        offer = msgspec.msgpack.decode(body, type=Offer)
        if sum(nbytes for _, nbytes in offer.places) != sum(map(len, views)):
            raise SyncError(f"{whom} offers a piece that has not its size")
        runs = list(_side_by_side(offer.places, [np.frombuffer(view, np.uint8) for view in views if len(view)]))
        if not runs:
            return
        try:
            self._engine.read(whom, offer.session, runs, is_over)
        except Lost:
            self.left_open = True
            raise

    def serve(self, whom: str, is_over: Callable[[], bool]) -> None:
        """Let `whom` read what was offered. Raises Lost: that takes too long."""
        self._engine.serve(whom, is_over)

    def close(self) -> None:
        with self._lock:
            for memory in [*self._slots.values(), *([self._region[1]] if self._region else [])]:
                self._engine.unregister(memory)
            self._slots, self._region = {}, None


class Offering:
    """The pieces of one stream, offered in turn. `slots`: registered memory for those that are not registered where they lie."""

    def __init__(self, reads: RemoteReads, connection: Connection, slots: Sequence[np.ndarray] = ()) -> None:
        self._reads, self._connection = reads, connection
        self._free = deque(slots)
        self._offered: deque[np.ndarray | None] = deque()

    def piece(self, header: Header, payload: Sequence[memoryview | bytes]) -> None:
        """Its header as for the bytes themselves."""
        if len(self._offered) == _AHEAD:
            self._wait()
        views = [np.frombuffer(view, np.uint8) for view in payload if len(view)]
        slot = self._free.popleft() if self._free else None
        if slot is not None:
            np.concatenate(views, out=slot[: header.nbytes]) if views else None
            views = [slot[: header.nbytes]] if header.nbytes else []
        body = self._reads.offer(views)
        self._offered.append(slot)
        self._connection.write(header._replace(encoding=READ, nbytes=len(body)), [body])

    def end(self) -> None:
        """Until all of them were taken."""
        while self._offered:
            self._wait()

    def _wait(self) -> None:
        while True:
            self._reads.serve(self._connection.whom, self._connection.has_news)
            if (header := self._connection.read()).kind == Kind.TAKEN:
                break
            self._connection.expect_nothing_else(header)
        slot = self._offered.popleft()
        if slot is not None:
            self._free.append(slot)


def _side_by_side(places: Sequence[tuple[int, int]], views: Sequence[np.ndarray]) -> Iterator[Run]:
    """Runs of bytes that lie together at both ends."""
    here = deque((address_of(view), view.nbytes) for view in views)
    for address, left in places:
        while left:
            mine, room = here.popleft()
            size = min(room, left)
            yield mine, address, size
            address, left = address + size, left - size
            if room > size:
                here.appendleft((mine + size, room - size))
