"""Frames and their codes, each for one connection; streams that stand or fall together: what the other ends hear at the end;
and pieces that are cast as they are sent."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_mux.sync import sending
from verl_mux.sync.connection import Connection, Header, Hello, Kind, Seal, new_key
from verl_mux.sync.layout import Entry, SyncError
from verl_mux.sync.sending import Part, Shard, Streams


class InAFrame:
    """The lock of a connection that another thread has until somebody waits for it."""

    def __init__(self, ends: bool) -> None:
        self.ends, self._lock = ends, threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self.ends and blocking and timeout > 0 and self._lock.acquire()

    def release(self) -> None:
        self._lock.release()


@contextlib.contextmanager
def pair() -> Iterator[tuple[Connection, Connection]]:
    key = new_key()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        server.settimeout(10.0)
        there = pool.submit(Connection.to, server.getsockname(), "here", Seal(key), Hello("there", 0, 1), 10.0)
        accepted = Connection.accepted(server.accept()[0], Seal(key), 10.0)
        assert accepted is not None
        yield accepted[0], there.result(10.0)
        accepted[0].close()
        there.result().close()


def test_one_that_stands_still_takes_no_last_word_from_one_that_is_sent_to(monkeypatch):
    """Whose frames follow one another: when the first has had its time, it would be in the middle of one."""
    monkeypatch.setattr(sending, "LAST_CALL_S", 0.5)
    payload = memoryview(bytearray(4 << 20))
    with pair() as (still, _), pair() as (here, there), ThreadPoolExecutor() as pool:
        streams, begun = Streams("here"), threading.Event()
        still._writing.acquire()
        streams.add(still)
        streams.add(here)
        writing, hearing = pool.submit(_write_on, here, payload), pool.submit(_read_on, there, begun)
        assert begun.wait(10.0)
        streams.fail(SyncError("rank 1 did not come"))
        assert hearing.result(10.0) == "rank 1 did not come"
        writing.result(10.0)


def _write_on(connection: Connection, payload: memoryview) -> None:
    with contextlib.suppress(SyncError):
        while True:
            connection.write(Header(Kind.PIECE, nbytes=len(payload)), [payload])


def _read_on(connection: Connection, begun: threading.Event) -> str:
    try:
        while True:
            header = connection.read()
            if header.kind == Kind.FAILED:
                connection.expect_nothing_else(header)
            begun.set()
            connection.body(header)
    except SyncError as error:
        return str(error)


@pytest.mark.parametrize(("ends", "heard"), [(True, "rank 1 did not come"), (False, "here is gone: its connection ended")])
def test_the_reason_comes_after_a_frame_that_was_on_its_way_where_that_one_ends(ends, heard, monkeypatch):
    monkeypatch.setattr(sending, "LAST_CALL_S", 0.2)
    with pair() as (here, there), pair() as (other, beyond):
        streams = Streams("here")
        here._writing = InAFrame(ends)  # type: ignore[assignment]
        streams.add(here)
        streams.add(other)
        streams.fail(SyncError("rank 1 did not come"))
        with pytest.raises(SyncError, match=heard):
            there.wait_for(Kind.GO)
        with pytest.raises(SyncError, match="rank 1 did not come"):
            beyond.wait_for(Kind.GO)


def test_a_header_tells_the_sizes_of_the_largest_models():
    noted = Header(Kind.ATTACH, number=2**41, nbytes=2**40, source=2**20, digest=2**64 - 1)
    with pair() as (here, there):
        there.write(noted)
        assert here.read() == noted


def test_only_who_has_the_key_makes_the_code_and_each_connection_its_own():
    key = new_key()
    one, other = Seal(key).of_connection(b"nonce 1", b"hello"), Seal(key).of_connection(b"nonce 2", b"hello")
    assert not other.is_ours(one.code(b"header"), b"header")
    code = Seal(key).code(b"header", b"body")
    assert Seal(key).is_ours(code, b"header", b"body")
    for seal, given, parts in [
        (Seal(new_key()), code, (b"header", b"body")), (Seal(key), code, (b"headerbody",)),
        (Seal(key), code, (b"header", b"bodi")), (Seal(key), code[:-1], (b"header", b"body")),
        (Seal(key), b"", (b"header", b"body")),
    ]:  # fmt: skip
        assert not seal.is_ours(given, *parts)


def shard_of(read: Callable[[int, int], memoryview], pieces: int = 4) -> Shard:
    """Of so many pieces of 8 bytes, which `read` makes."""
    entries = [Entry("t", "uint8", (8 * pieces,), 8 * pieces)]
    return Shard(0, entries, [Part(0, 0, 8 * pieces, read)], 8, made=True)


def test_streams_cast_pieces_at_the_same_time():
    both = threading.Barrier(2, timeout=10.0)

    def cast(start: int, end: int) -> memoryview:
        both.wait()
        return memoryview(bytes(range(start, end)))

    shard = shard_of(cast)
    with ThreadPoolExecutor(2) as streams:
        payloads = list(streams.map(shard.payload, (0, 1)))
    assert [bytes(view) for views in payloads for view in views] == [bytes(range(8)), bytes(range(8, 16))]


def test_a_piece_is_cast_once_for_all_hosts_that_want_it_now():
    read, begun, go_on = [], threading.Event(), threading.Event()

    def cast(start: int, end: int) -> memoryview:
        read.append(start)
        begun.set()
        assert go_on.wait(10.0)
        return memoryview(bytes(end - start))

    shard = shard_of(cast)
    with ThreadPoolExecutor(4) as streams:
        first = streams.submit(shard.payload, 1)
        assert begun.wait(10.0)
        others = [streams.submit(shard.payload, 1) for _ in range(3)]
        go_on.set()
        assert all(other.result(10.0) is first.result(10.0) for other in others)
    assert read == [8]


def test_an_error_of_a_cast_reaches_all_that_want_the_piece():
    shard = shard_of(lambda start, end: memoryview(bytes(8))[1 // 0 :])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            shard.payload(2)
