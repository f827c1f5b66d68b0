"""Pieces that who receives reads out of the sender's memory, by RDMA, instead of taking them from the socket.

Mooncake's transfer engine reads (mooncake-transfer-engine; its protocol tcp is for machines without RDMA, and slow). Frames go
over the socket as ever, sealed, with the piece's digest; in place of the bytes they say where these lie. Nobody writes into
somebody else's memory, so nothing that is late can spoil a sync that came after.

    sender: a piece into a slot --> frame: where it lies -->        receiver: reads it into the region, checks it
            slot free again <-------------------- TAKEN <--

Who hands on needs no slots: what it hands on lies in its region until the sync is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator, Sequence

import msgspec
import numpy as np

from verl_mux.errors import UserError
from verl_mux.sync.failure import Lost, SyncError
from verl_mux.sync.region import Region
from verl_mux.sync.streams.connection import Connection, Header, Kind

# `encoding` of a piece, beside those of delta.py.
READ = 2
# Pieces that a stream offers before it hears that the first was taken.
_AHEAD = 2


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """Where a piece lies: (address, bytes) one after the other, in the memory of the engine `session`."""

    session: str
    places: list[tuple[int, int]]


class RemoteReads:
    """One transfer engine in this process, kept over syncs. Thread-safe.

    Args:
        address: of the interface by which others reach this host.
        protocol: rdma or tcp.
        device: RDMA devices, comma-separated; "": those that the engine finds.

    Raises:
        UserError: there is no engine, or it does not start.
    """

    def __init__(self, address: str, protocol: str, device: str) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise UserError(f"mux.sync.transport=mooncake: {error} (pip install mooncake-transfer-engine, libibverbs)") from None
        self._engine = TransferEngine()
        if code := self._engine.initialize(address, "P2PHANDSHAKE", protocol, device):
            raise UserError(f"mux.sync.transport=mooncake: its engine does not start with protocol {protocol} (code {code})")
        self._session = f"{address}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        self._slots: dict[Hashable, np.ndarray] = {}
        self._region: tuple[Region, np.ndarray] | None = None

    def hold(self, region: Region) -> None:
        """The region that is read into and handed on from; the one before is let go."""
        with self._lock:
            if self._region is not None and self._region[0] is region:
                return
            if self._region is not None:
                self._engine.unregister_memory(_address(self._region[1]))
            whole = np.frombuffer(region.view, np.uint8) if region.nbytes else np.empty(1, np.uint8)
            self._register(whole)
            self._region = region, whole

    def slots(self, whose: Hashable, nbytes: int) -> list[np.ndarray]:
        """As many as may be offered at once, of `nbytes` each; the same ones in every sync."""
        with self._lock:
            kept = self._slots.get(whose)
            if kept is None or len(kept) < _AHEAD * nbytes:
                if kept is not None:
                    self._engine.unregister_memory(_address(kept))
                kept = self._slots[whose] = np.empty(_AHEAD * nbytes, np.uint8)
                self._register(kept)
            return np.split(kept[: _AHEAD * nbytes], _AHEAD)

    def offer(self, views: Sequence[np.ndarray]) -> bytes:
        """What the other end needs to read these, which have to be registered and to stay as they are until it has."""
        return msgspec.msgpack.encode(Offer(self._session, [(_address(view), view.nbytes) for view in views]))

    def read(self, whom: str, body: bytes, views: Sequence[memoryview]) -> None:
        """What was offered into these, which lie in the region.

        Raises:
            SyncError: as much was not offered.
            Lost: it cannot be read, or not within the engine's own time limit.
        """
        offer = msgspec.msgpack.decode(body, type=Offer)
        if sum(nbytes for _, nbytes in offer.places) != sum(map(len, views)):
            raise SyncError(f"{whom} offers a piece that has not its size")
        parts = list(_side_by_side(offer.places, [np.frombuffer(view, np.uint8) for view in views if len(view)]))
        here, there, sizes = [part[0] for part in parts], [part[1] for part in parts], [part[2] for part in parts]
        if parts and self._engine.batch_transfer_sync_read(offer.session, here, there, sizes):
            raise Lost(f"the weights of {whom} cannot be read from its memory")

    def _register(self, memory: np.ndarray) -> None:
        if code := self._engine.register_memory(_address(memory), memory.nbytes):
            raise SyncError(f"{memory.nbytes} bytes cannot be registered with the transfer engine (code {code})")

    def close(self) -> None:
        with self._lock:
            for memory in [*self._slots.values(), *([self._region[1]] if self._region else [])]:
                self._engine.unregister_memory(_address(memory))
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
        self._connection.wait_for(Kind.TAKEN)
        slot = self._offered.popleft()
        if slot is not None:
            self._free.append(slot)


def _address(memory: np.ndarray) -> int:
    return memory.ctypes.data


def _side_by_side(places: Sequence[tuple[int, int]], views: Sequence[np.ndarray]) -> Iterator[tuple[int, int, int]]:
    """(address here, address there, bytes) of runs of bytes that lie together at both ends."""
    here = deque((_address(view), view.nbytes) for view in views)
    for address, left in places:
        while left:
            mine, room = here.popleft()
            size = min(room, left)
            yield mine, address, size
            address, left = address + size, left - size
            if room > size:
                here.appendleft((mine + size, room - size))
