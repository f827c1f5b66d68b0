"""Let the receiving host read pieces out of the sender's memory with NIXL (RDMA where there is some) instead of a socket.

    sender: copy a piece into a slot --> frame: where it lies -->   receiver: reads it into the region, checks it
            slot free again <-------------------- TAKEN <--

Runs in trainer workers and rollout workers; called by sending.py and receiving.py; touches registered memory. Frames still go
over the socket, sealed, with the piece's digest. No end writes into another's memory, so a late read cannot spoil a later sync.
NIXL (https://github.com/ai-dynamo/nixl) runs on UCX, over TCP at the least.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np

from verl_mux.errors import UserError
from verl_mux.sync.connection import Connection, Header, Kind
from verl_mux.sync.layout import Lost, Region, SyncError

# `encoding` of a piece: its bytes follow in the frame, or are read from where they lie.
WHOLE, PLACED, READ = 0, 1, 2
# Pieces that a stream offers before the first was taken.
_AHEAD = 2
# Seconds between two looks at a transfer.
_POLL_S = 0.0002

# (address here, address there, bytes) of one run.
Run = tuple[int, int, int]


def address_of(memory: np.ndarray) -> int:
    return memory.ctypes.data


class _Session(msgspec.Struct, array_like=True, frozen=True):
    """What another process needs to read registered memory: the name of the NIXL agent, and its metadata."""

    agent: str
    metadata: bytes


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """Where a piece lies: runs of (address, bytes) in memory that the agent of `session` has registered."""

    session: bytes
    places: list[tuple[int, int]]


class RemoteReads:
    """The NIXL agent of this process, and the memory that it has registered, kept over syncs. Reads end after `timeout_s`.
    Thread-safe. `left_open`: a read was given up, and may still write into the region.

    Raises:
        UserError: there is no nixl, or it does not start.
    """

    def __init__(self, timeout_s: float) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise UserError(f"mux.sync.transport=nixl: {error} (pip install nixl)") from None
        self._name, self._timeout_s = f"verl_mux_{uuid4().hex}", timeout_s
        try:
            # NIXL's progress thread would spin on a core.
            self._agent: Any = nixl_agent(self._name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        except Exception as error:
            raise UserError(f"mux.sync.transport=nixl: it does not start: {error}") from None
        # NIXL's agent is not made for several threads.
        self._lock = threading.RLock()
        self._registered: dict[int, Any] = {}
        self._session: bytes | None = None
        self._slots: dict[Hashable, np.ndarray] = {}
        self._region: tuple[Region, np.ndarray] | None = None
        self.left_open = False
        self._known: dict[str, bytes] = {}  # metadata of other agents
        self._reading: Counter[str] = Counter()  # reads under way from each
        self._idle = threading.Condition()

    # ------------------------------------------------------------ memory of this process

    def hold(self, region: Region) -> None:
        """Register the region that is read into; release the one before. Raises SyncError."""
        with self._lock:
            if self._region is not None and self._region[0] is region:
                return
            if self._region is not None:
                self._unregister(self._region[1])
            whole = np.frombuffer(region.view, np.uint8) if region.nbytes else np.empty(1, np.uint8)
            self._register(whole)
            self._region = region, whole

    def slots(self, whose: Hashable, nbytes: int) -> list[np.ndarray]:
        """Slots of `nbytes` for the pieces that may be offered at once; the same ones in every sync. Raises SyncError."""
        with self._lock:
            kept = self._slots.get(whose)
            if kept is None or len(kept) < _AHEAD * nbytes:
                if kept is not None:
                    self._unregister(kept)
                kept = self._slots[whose] = np.empty(_AHEAD * nbytes, np.uint8)
                self._register(kept)
            return np.split(kept[: _AHEAD * nbytes], _AHEAD)

    def offer(self, views: Sequence[np.ndarray]) -> bytes:
        """The body of a frame that offers these registered views, which must not change until they are read."""
        with self._lock:
            if self._session is None:
                self._session = msgspec.msgpack.encode(_Session(self._name, self._agent.get_agent_metadata()))
            return msgspec.msgpack.encode(Offer(self._session, [(address_of(view), view.nbytes) for view in views]))

    def serve(self, whom: str, is_over: Callable[[], bool]) -> None:
        """Let `whom` read until `is_over`. Raises Lost: that takes longer than `timeout_s`."""
        deadline = time.monotonic() + self._timeout_s
        while not is_over():
            if time.monotonic() > deadline:
                raise Lost(f"{whom} stands still: nothing moved for {self._timeout_s:g} s")
            with self._lock:
                self._agent.get_new_notifs()  # as a side effect, UCX moves on
            time.sleep(_POLL_S)

    def close(self) -> None:
        with self._lock:
            for memory in [*self._slots.values(), *([self._region[1]] if self._region else [])]:
                self._unregister(memory)
            self._slots, self._region = {}, None

    def _register(self, memory: np.ndarray) -> None:
        try:
            handle = self._agent.register_memory([(address_of(memory), memory.nbytes, 0, "")], "DRAM")
        except Exception as error:
            raise SyncError(f"{memory.nbytes} bytes cannot be registered with nixl: {error}") from None
        self._registered[address_of(memory)], self._session = handle, None

    def _unregister(self, memory: np.ndarray) -> None:
        self._agent.deregister_memory(self._registered.pop(address_of(memory)))
        self._session = None

    # ------------------------------------------------------------ memory of others

    def read(self, whom: str, body: bytes, views: Sequence[memoryview], is_over: Callable[[], bool]) -> None:
        """Read what `whom` offered into `views`, which lie in the region.

        Raises:
            SyncError: the offer has another size.
            Lost: it cannot be read, not within the time limit, or `is_over` before it ended.
        """
        offer = msgspec.msgpack.decode(body, type=Offer)
        if sum(nbytes for _, nbytes in offer.places) != sum(map(len, views)):
            raise SyncError(f"{whom} offers a piece that has not its size")
        runs = list(_side_by_side(offer.places, [np.frombuffer(view, np.uint8) for view in views if len(view)]))
        if not runs:
            return
        agent = ""
        try:
            other = msgspec.msgpack.decode(offer.session, type=_Session)
            agent = other.agent
            with self._introduced(other):
                self._transfer(whom, agent, runs, is_over)
        except Exception as error:  # NIXL raises many kinds
            self.left_open = True
            with self._idle:
                self._known.pop(agent, None)  # NIXL forgets an agent that it lost
            if isinstance(error, Lost):
                raise
            raise Lost(f"the weights of {whom} cannot be read from its memory: {error}") from None

    @contextlib.contextmanager
    def _introduced(self, other: _Session) -> Iterator[None]:
        """Make NIXL know what `other` has registered by now. It replaces an agent as a whole, so reads from it must end first."""
        with self._idle:
            if self._known.get(other.agent) != other.metadata:
                self._idle.wait_for(lambda: not self._reading[other.agent])
                with self._lock:
                    self._known.pop(other.agent, None)
                    with contextlib.suppress(Exception):  # NIXL may not know the agent
                        self._agent.remove_remote_agent(other.agent)
                    self._agent.add_remote_agent(other.metadata)
                self._known[other.agent] = other.metadata
            self._reading[other.agent] += 1
        try:
            yield
        finally:
            with self._idle:
                self._reading[other.agent] -= 1
                self._idle.notify_all()

    def _transfer(self, whom: str, agent: str, runs: Sequence[Run], is_over: Callable[[], bool]) -> None:
        with self._lock:
            here = self._agent.get_xfer_descs([(mine, nbytes, 0) for mine, _, nbytes in runs], "DRAM")
            there = self._agent.get_xfer_descs([(theirs, nbytes, 0) for _, theirs, nbytes in runs], "DRAM")
            handle = self._agent.initialize_xfer("READ", here, there, agent)
        try:
            with self._lock:
                state = self._agent.transfer(handle)
            deadline = time.monotonic() + self._timeout_s
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise Lost(f"the weights of {whom} could not be read from its memory within {self._timeout_s:g} s")
                if is_over():
                    raise Lost(f"{whom} left before its weights were read")
                time.sleep(_POLL_S)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise Lost(f"the weights of {whom} cannot be read from its memory ({state})")
        finally:
            with self._lock:
                self._agent.release_xfer_handle(handle)


class Offering:
    """The pieces of one stream, offered in turn out of `slots`, which are registered memory."""

    def __init__(self, reads: RemoteReads, connection: Connection, slots: Sequence[np.ndarray]) -> None:
        self._reads, self._connection = reads, connection
        self._free = deque(slots)
        self._offered: deque[np.ndarray] = deque()

    def piece(self, header: Header, payload: Sequence[memoryview]) -> None:
        """Offer a piece. `header`: as if its bytes followed."""
        if not self._free:
            self._wait()
        slot = self._free.popleft()
        views = [np.frombuffer(view, np.uint8) for view in payload if len(view)]
        if views:
            np.concatenate(views, out=slot[: header.nbytes])
        body = self._reads.offer([slot[: header.nbytes]] if header.nbytes else [])
        self._offered.append(slot)
        self._connection.write(header._replace(encoding=READ, nbytes=len(body)), [body])

    def end(self) -> None:
        """Wait until all of them were taken."""
        while self._offered:
            self._wait()

    def _wait(self) -> None:
        while True:
            self._reads.serve(self._connection.whom, self._connection.has_news)
            if (header := self._connection.read()).kind == Kind.TAKEN:
                break
            self._connection.expect_nothing_else(header)
        self._free.append(self._offered.popleft())


def _side_by_side(places: Sequence[tuple[int, int]], views: Sequence[np.ndarray]) -> Iterator[Run]:
    """Runs of bytes that are contiguous at both ends."""
    here = deque((address_of(view), view.nbytes) for view in views)
    for address, left in places:
        while left:
            mine, room = here.popleft()
            size = min(room, left)
            yield mine, address, size
            address, left = address + size, left - size
            if room > size:
                here.appendleft((mine + size, room - size))
