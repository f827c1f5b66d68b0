"""Libraries that read another process's memory, by RDMA where there is some: what remote_reads.py asks of them.

nixl (https://github.com/ai-dynamo/nixl, with UCX) takes whatever both hosts have, TCP at the least. Mooncake's transfer engine
takes what it is told.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from uuid import uuid4

import msgspec
import numpy as np

from verl_mux.errors import UserError
from verl_mux.sync.failure import Lost, SyncError

# Between two looks at a transfer.
_POLL_S = 0.0002

# (address here, address there, bytes) of one run.
Run = tuple[int, int, int]


class TransferEngine(Protocol):
    """One in a process. Thread-safe."""

    @property
    def session(self) -> bytes:
        """What others need to read what is registered here now."""

    def register(self, memory: np.ndarray) -> None:
        """Raises SyncError."""

    def unregister(self, memory: np.ndarray) -> None: ...

    def read(self, whom: str, session: bytes, runs: Sequence[Run], is_over: Callable[[], bool]) -> None:
        """From the memory of `whom` into registered memory here. Raises Lost: it cannot be read, or it is over before that."""

    def serve(self, whom: str, is_over: Callable[[], bool]) -> None:
        """Let `whom` read until then; return at once where it needs no help. Raises Lost: that takes too long."""


def address_of(memory: np.ndarray) -> int:
    return memory.ctypes.data


class Mooncake:
    """Reads are bounded by the engine's own time limit.

    Args:
        address: of the interface by which others reach this host.
        protocol: rdma or tcp.
        device: RDMA devices, comma-separated; "": those that the engine finds.

    Raises:
        UserError: there is no engine, or it does not start.
    """

    def __init__(self, address: str, protocol: str, device: str) -> None:
        try:
            from mooncake.engine import TransferEngine as Engine
        except ImportError as error:
            raise UserError(f"mux.sync.transport=mooncake: {error} (pip install mooncake-transfer-engine, libibverbs)") from None
        self._engine = Engine()
        if code := self._engine.initialize(address, "P2PHANDSHAKE", protocol, device):
            raise UserError(f"mux.sync.transport=mooncake: its engine does not start with protocol {protocol} (code {code})")
        self.session = f"{address}:{self._engine.get_rpc_port()}".encode()

    def register(self, memory: np.ndarray) -> None:
        if code := self._engine.register_memory(address_of(memory), memory.nbytes):
            raise SyncError(f"{memory.nbytes} bytes cannot be registered with the transfer engine (code {code})")

    def unregister(self, memory: np.ndarray) -> None:
        self._engine.unregister_memory(address_of(memory))

    def read(self, whom: str, session: bytes, runs: Sequence[Run], is_over: Callable[[], bool]) -> None:
        here, there, sizes = zip(*runs, strict=True)
        if self._engine.batch_transfer_sync_read(session.decode(), list(here), list(there), list(sizes)):
            raise Lost(f"the weights of {whom} cannot be read from its memory")

    def serve(self, whom: str, is_over: Callable[[], bool]) -> None:
        """It has threads for it."""


class _Session(msgspec.Struct, array_like=True, frozen=True):
    """`agent`: its name, as nixl has it."""

    agent: str
    metadata: bytes


class Nixl:
    """Reads end after `timeout_s`.

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
            # Its own thread for progress would spin on a core for good.
            self._agent: Any = nixl_agent(self._name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        except Exception as error:
            raise UserError(f"mux.sync.transport=nixl: it does not start: {error}") from None
        # nixl's agent is not told to expect several threads.
        self._lock = threading.Lock()
        self._registered: dict[int, Any] = {}
        self._session: bytes | None = None
        self._known: dict[str, bytes] = {}
        self._reading: Counter[str] = Counter()
        self._idle = threading.Condition()

    @property
    def session(self) -> bytes:
        with self._lock:
            if self._session is None:
                self._session = msgspec.msgpack.encode(_Session(self._name, self._agent.get_agent_metadata()))
            return self._session

    def register(self, memory: np.ndarray) -> None:
        with self._lock:
            try:
                found = self._agent.register_memory([(address_of(memory), memory.nbytes, 0, "")], "DRAM")
            except Exception as error:
                raise SyncError(f"{memory.nbytes} bytes cannot be registered with nixl: {error}") from None
            self._registered[address_of(memory)], self._session = found, None

    def unregister(self, memory: np.ndarray) -> None:
        with self._lock:
            self._agent.deregister_memory(self._registered.pop(address_of(memory)))
            self._session = None

    def read(self, whom: str, session: bytes, runs: Sequence[Run], is_over: Callable[[], bool]) -> None:
        agent = ""
        try:
            it = msgspec.msgpack.decode(session, type=_Session)
            agent = it.agent
            with self._introduced(it):
                self._transfer(whom, it.agent, runs, is_over)
        except Exception as error:  # nixl's are of many kinds
            with self._idle:
                self._known.pop(agent, None)  # it forgets whom it lost
            if isinstance(error, Lost):
                raise
            raise Lost(f"the weights of {whom} cannot be read from its memory: {error}") from None

    def serve(self, whom: str, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not is_over():
            if time.monotonic() > deadline:
                raise Lost(f"{whom} stands still: nothing moved for {self._timeout_s:g} s")
            with self._lock:
                self._agent.get_new_notifs()  # as a side effect, UCX moves on
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _introduced(self, it: _Session) -> Iterator[None]:
        """What it registered since is known too. nixl forgets an agent as a whole, so nobody reads from it meanwhile."""
        with self._idle:
            if self._known.get(it.agent) != it.metadata:
                self._idle.wait_for(lambda: not self._reading[it.agent])
                with self._lock:
                    self._known.pop(it.agent, None)
                    with contextlib.suppress(Exception):  # it may know nothing of it
                        self._agent.remove_remote_agent(it.agent)
                    self._agent.add_remote_agent(it.metadata)
                self._known[it.agent] = it.metadata
            self._reading[it.agent] += 1
        try:
            yield
        finally:
            with self._idle:
                self._reading[it.agent] -= 1
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
