"""Pieces that hosts read out of each other's memory, by NIXL over TCP; skipped where it is not installed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sync.cluster import Ends, model_of, stripe_of
from verl_mux.sync import remote_reads
from verl_mux.sync.layout import Entry, SyncError
from verl_mux.sync.remote_reads import RemoteReads, _side_by_side
from verl_mux.sync.sending import Part, Shard


@pytest.fixture
def ends():
    pytest.importorskip("nixl._api", exc_type=ImportError)
    made: list[Ends] = []

    def make(*args, **settings) -> Ends:
        made.append(Ends(*args, **{"piece_bytes": 1 << 16, "timeout_s": 60.0, "transport": "nixl", **settings}))
        return made[-1]

    yield make
    for its in made:
        its.close()


def test_every_worker_gets_the_model_and_little_goes_over_the_sockets(ends):
    its = ends(2, ["a", "a", "b"])
    for version in range(3):
        model = model_of(version, largest=300_000 + 100_000 * (version == 2))  # the last one needs another region
        got, said = its.sync(version, model)
        assert all(it == model for it in got), said
        sockets = sum(value for it in said for name, value in it.items() if name in ("local_bytes", "fast_bytes", "slow_bytes"))
        assert sockets < 0.2 * sum(map(len, model.values()))


def test_memory_that_is_other_than_its_digest_is_found_out_and_the_next_sync_works(ends, monkeypatch):
    its = ends(1, ["a"])
    model = model_of(3, largest=300_000)
    read = RemoteReads.read

    def damaged(self, whom, body, views, is_over):
        read(self, whom, body, views, is_over)
        views[0][0] ^= 1

    monkeypatch.setattr(RemoteReads, "read", damaged)
    got, said = its.sync(0, model)
    assert isinstance(got[0], SyncError) and "arrived damaged" in str(got[0]) and isinstance(said[0], SyncError)
    monkeypatch.setattr(RemoteReads, "read", read)
    got, said = its.sync(1, model)
    assert got == [model], said


def test_memory_that_cannot_be_read_is_somebody_lost(ends, monkeypatch):
    its = ends(1, ["a"])
    offer = RemoteReads.offer
    gone = remote_reads.msgspec.msgpack.encode(remote_reads.Offer(b"127.0.0.1:1", [(4096, 1)]))
    monkeypatch.setattr(RemoteReads, "offer", lambda self, views: gone if views and views[0].nbytes == 1 else offer(self, views))
    shard = Shard(0, [Entry("x", "uint8", (1,), 1)], [Part(0, 0, 1, lambda a, b: memoryview(b"y")[a:b])], 4096)
    got, _ = its.sync(0, {"x": b"y"}, shard=lambda rank: shard)
    assert isinstance(got[0], SyncError) and "cannot be read from its memory" in str(got[0])
    monkeypatch.setattr(RemoteReads, "offer", offer)
    model, before = model_of(4), its.workers[0]._held._region
    assert its.sync(1, model)[0] == [model]
    assert its.workers[0]._held._region is not before, "what was given up may still be written there"


def test_who_reads_from_sockets_alone_says_so(ends):
    its = ends(1, ["a"])
    its.workers[0]._reads = None
    model = model_of(5)
    got, _ = its.sync(0, model, shard=lambda rank: stripe_of(model, 0, 1, 1 << 16))
    assert isinstance(got[0], SyncError) and "reads from sockets alone" in str(got[0])


def test_runs_of_bytes_that_lie_together_at_both_ends():
    memory = np.zeros(10, np.uint8)
    at = memory.ctypes.data
    views = [memory[:3], memory[5:10]]
    assert list(_side_by_side([(100, 2), (200, 6)], views)) == [(at, 100, 2), (at + 2, 200, 1), (at + 5, 201, 5)]
