"""The two-stage plan, syncs among real ends in one process, and what goes wrong."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from functools import partial

import pytest

from bench.sync.group import parts
from tests.sync.cluster import Ends, model_of, stripe_of, take_all
from verl_mux.platform.host_memory import Room
from verl_mux.sync import layout, receiving, sending
from verl_mux.sync.connection import Connection, Header, Hello, Kind, Seal
from verl_mux.sync.ends import Follower, Meeting, two_stage
from verl_mux.sync.layout import SyncError
from verl_mux.sync.receiving import Role
from verl_mux.sync.remote_reads import PLACED

MODEL, NEXT = model_of(1), model_of(2)


@pytest.fixture(autouse=True)
def short_last_call(monkeypatch):
    for module in (sending, receiving):
        monkeypatch.setattr(module, "LAST_CALL_S", 0.2)


@pytest.fixture
def ends():
    made = []

    def make(*args, **settings) -> Ends:
        made.append(Ends(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def texts(outcomes) -> list[str]:
    """Of errors alone."""
    assert all(isinstance(it, SyncError) for it in outcomes), outcomes
    return [str(it) for it in outcomes]


def next_works(its: Ends) -> None:
    got, _ = its.sync(9, NEXT)
    assert all(it == NEXT for it in got), got


def meetings(hosts: int, each: int, cluster: str) -> list[Meeting]:
    return [
        Meeting(("10.0.0.1", 1), f"{cluster}{host}/{at}", f"{cluster}{host}", f"{cluster}{host}", cluster)
        for host in range(hosts)
        for at in range(each)
    ]


@pytest.mark.parametrize(("ranks", "hosts", "each"), [(1, 1, 1), (2, 3, 2), (8, 5, 1), (3, 8, 4), (64, 80, 8)])
def test_each_rank_sends_to_one_worker_of_each_host_and_the_others_map_its_memory(ranks, hosts, each):
    senders, receivers = two_stage(meetings(ranks, 1, "train"), meetings(hosts, each, "rollout"))
    roles = [it for it in receivers if isinstance(it, Role)]
    assert all(len(it.targets) == hosts and {target.link for target in it.targets} == {"slow"} for it in senders)
    assert [sorted(role.upstream.values()) for role in roles] == [list(range(ranks))] * hosts
    assert sorted(name for role in roles for name in (role.me, *role.readers)) == sorted(it.me for it in receivers)
    assert {it.whom for it in receivers if isinstance(it, Follower)} <= {role.me for role in roles}


def test_two_machines_of_one_name_are_told_apart():
    trainers = [Meeting(("::1", 1), "", machine, "gpu", "train") for machine in ("0123456789", "abcdefghij")]
    senders, _ = two_stage(trainers, [Meeting(("::1", 2), "", "0123456789", "gpu", "rollout")])
    assert [it.me for it in senders] == ["trainer rank 0 on gpu (01234567)", "trainer rank 1 on gpu (abcdefgh)"]
    assert [it.targets[0].link for it in senders] == ["local", "slow"]


@pytest.mark.parametrize(
    ("senders", "machines"), [(1, "a"), (2, "aabb"), (3, "abacc"), (8, "abcdefgh"), (1, "abcdefgh"), (5, "abc")]
)  # fmt: skip
def test_every_worker_gets_every_byte_in_order(ends, senders, machines):
    got, _ = ends(senders, list(machines)).sync(3, MODEL)
    assert all(it == MODEL and list(it) == list(MODEL) for it in got)


@pytest.mark.parametrize("others", [[], ["trainers", "a"]])
def test_what_goes_to_a_ranks_own_host_is_put_there_each_time_into_the_same_memory(ends, others, monkeypatch):
    its, seen = ends(2, ["trainers", *others]), set()
    if not others:  # not a byte goes through a socket
        monkeypatch.setattr(sending.Shard, "payload", None)
    for version, model in ((1, MODEL), (2, model_of(1))):
        got, figures = its.sync(version, model)
        assert all(it == model for it in got)
        assert sum(it["local_bytes"] for it in figures) > sum(map(len, MODEL.values()))
        seen |= {id(end._held._region) for end in its.senders}
    assert len(seen) == 2


def test_no_other_host_may_say_that_it_put_a_piece_there(ends, monkeypatch):
    its = ends(1, ["a"])
    monkeypatch.setattr(sending.Sending, "_piece", lambda self, it, number, _: it.write(Header(Kind.PIECE, PLACED, 0, number)))
    got, _ = its.sync(1, MODEL)
    assert "of trainer rank 0 has 0 bytes, which is not its size" in texts(got)[0]


def test_one_rank_alone_may_be_pulled_from(ends):
    got, _ = ends(1, ["a", "a", "b"], partial(parts, "pull")).sync(3, MODEL)
    assert all(it == MODEL for it in got)


def test_the_model_comes_to_each_host_once(ends):
    its, model = ends(4, list("abacb"), piece_bytes=1 << 20), model_of(3, 6, 8 << 20)
    got, said = its.sync(1, model)
    assert all(it == model for it in got)
    whole = sum(map(len, model.values()))
    assert 3 * whole < sum(it["slow_bytes"] for it in said) < 3 * whole * 1.001
    received = [end.figures["received_bytes"] for end in its.workers if "received_bytes" in end.figures]
    assert len(received) == 3 and all(whole < nbytes < whole * 1.001 for nbytes in received)


def test_workers_of_a_host_have_the_same_memory_over_syncs(ends):
    its = ends(2, ["a", "a"])
    seen = []
    for version in (1, 2):
        its.sync(version, MODEL)
        mine, other = (end._held._region for end in its.workers)
        mine.view[:4] = b"seen"
        assert bytes(other.view[:4]) == b"seen"
        seen.append((mine, other))
    assert seen[0] == seen[1]


def test_making_room_may_take_longer_than_an_end_may_be_silent(ends, monkeypatch):
    """As for the largest models: the kernel zeroes some GB in a second."""
    model, real = {"large": bytes(32 << 20)}, layout.Region.made  # more than sockets take while no end reads

    def synced(timeout_s: float):
        def slowly(nbytes):
            time.sleep(2.25 * timeout_s)
            return real(nbytes)

        monkeypatch.setattr(layout.Region, "made", slowly)
        got, said = ends(2, ["a", "a", "b"], timeout_s=timeout_s).sync(1, model)
        return [] if all(it == model for it in got) else [*got, *said]

    wrong = synced(2.0)
    if wrong:  # a busy machine may not even connect the ends within the first limit
        wrong = synced(8.0)
    assert not wrong


def test_a_model_of_another_size_takes_new_memory(ends):
    its = ends(2, ["a", "a", "b"])
    for version in range(3):
        model = model_of(version, 5 + version)
        got, _ = its.sync(version, model)
        assert all(it == model for it in got)


def test_a_sync_that_is_over_keeps_nothing_of_the_senders_weights(ends):
    its, shards = ends(2, ["a"]), []

    def shard(rank):
        made = stripe_of(MODEL, rank, 2, 4096)
        shards.append(weakref.ref(made))
        return made

    its.sync(1, MODEL, shard)
    assert [it() for it in shards] == [None, None]


@pytest.mark.parametrize("settings", [{"piece_bytes": 7}, {"piece_bytes": 1 << 30}, {"streams": 5}, {"verify": False}])
def test_sizes_and_streams_change_nothing(ends, settings):
    model = model_of(4, 5, 2000)
    got, _ = ends(2, ["a", "a", "b"], **settings).sync(1, model)
    assert all(it == model for it in got)


class TestErrors:
    """Everybody is told, and the next sync works."""

    @pytest.mark.parametrize("asked", [2, 4])
    def test_another_version_is_an_error_for_everybody(self, ends, asked):
        its = ends(2, ["a", "a", "b"])
        got, said = its.sync(3, MODEL, asked=asked)
        text = f"rollout waits for weights of version {asked}, trainer rank "
        assert any(text in it for it in texts(got)) and any(text in it for it in texts(said))
        next_works(its)

    def test_a_trainer_rank_that_does_not_come_is_named_within_the_timeout(self, ends):
        def shard(rank):
            if rank == 1:
                raise SyncError("out of memory")
            return stripe_of(MODEL, rank, 2, 4096)

        its = ends(2, ["a", "a"], timeout_s=1.5)
        got, said = its.sync(1, MODEL, shard)
        told = "trainer rank 1 on trainers did not come to rollout worker 0 on a within 1.5 s"
        assert texts([*got, *said]) == [told, told, told, "out of memory"]
        next_works(its)

    def test_a_worker_that_does_not_come_is_named_within_the_timeout(self, ends):
        its = ends(2, ["a", "a", "b"], timeout_s=1.5)
        got, said = its.sync(1, MODEL, take=lambda end, version: {} if end is its.workers[1] else take_all(end, version))
        assert texts(got[:1]) == ["rollout worker 1 on a did not come to rollout worker 0 on a within 1.5 s"]
        assert len(texts(said)) == 2
        assert got[2] == MODEL or isinstance(got[2], SyncError)  # its host needs nothing of the other one
        next_works(its)

    def test_damaged_bytes_are_named_by_tensor_and_sender(self, ends, monkeypatch):
        its = ends(2, ["a", "b"])
        with monkeypatch.context() as patch:
            patch.setattr("verl_mux.sync.sending.digest", lambda payload: 1)
            got, said = its.sync(1, MODEL)
        assert any("bytes that trainer rank" in it and "arrived damaged" in it for it in texts(got))
        assert any("arrived damaged" in it for it in texts(said))
        next_works(its)

    def test_ranks_that_disagree_on_the_model_are_named(self, ends):
        its = ends(2, ["a", "b"])
        got, said = its.sync(1, MODEL, lambda rank: stripe_of([MODEL, NEXT][rank], rank, 2, 4096))
        assert any("disagree on the model: t0 uint8" in it for it in texts([*got, *said]))
        next_works(its)

    def test_too_little_memory_is_told_everybody(self, ends, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        its = ends(2, ["a", "a", "b"])
        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", full)
            got, said = its.sync(1, MODEL)
        assert all("bytes of shared memory on this host: No space left" in it for it in texts(got))
        assert texts(said)
        next_works(its)

    def test_a_model_larger_than_the_hosts_memory_is_refused_before_any_is_taken(self, ends, monkeypatch):
        its = ends(1, ["a"])
        with monkeypatch.context() as patch:
            patch.setattr("verl_mux.sync.layout.room", lambda: Room(1 << 30, 100 << 20, "a container"))
            patch.setattr("verl_mux.sync.layout._RESERVE", (100 << 20) - 1000)
            got, _ = its.sync(1, MODEL)
        assert "bytes of shared memory on this host, and 104857600 are free" in texts(got)[0]
        next_works(its)

    def test_who_stops_taking_is_told_on(self, ends):
        def first_only(end, version):
            reception = end.receiving(version)
            reception.start()
            with contextlib.suppress(SyncError):
                reception.progress.beyond(0)
            reception.close()
            return {}

        its = ends(1, ["a", "b"])
        its.sync(1, MODEL, take=first_only)
        next_works(its)
        assert not [it for it in threading.enumerate() if "_guarded" in it.name]

    def test_strangers_are_passed_over(self, ends):
        """Who has no key, another job's, or says nothing."""
        its = ends(1, ["a", "a"])
        address = its.workers[0].meeting.address
        silent = [socket.create_connection(address) for _ in range(3)]
        refused = []
        lies = [threading.Thread(target=lambda: refused.append(_introduce(address, Seal(b"other")))) for _ in range(3)]
        for it in lies:
            it.start()
        got, _ = its.sync(1, MODEL)
        assert all(it == MODEL for it in got)
        for it in lies:
            it.join()
        assert refused == [True] * 3
        for it in silent:
            it.close()

    def test_a_second_connection_of_a_stream_is_refused(self, ends, monkeypatch):
        """One that has the key and repeats what another said."""
        refused = []
        real = sending.Sending._piece

        def piece(self, connection, number, *rest):
            if not number:
                refused.append(_introduce(self._targets[0].address, self._seal))
            real(self, connection, number, *rest)

        monkeypatch.setattr(sending.Sending, "_piece", piece)
        its = ends(1, ["a"])
        got, _ = its.sync(1, MODEL)
        assert got[0] == MODEL and refused == [True]


def _introduce(address, seal: Seal) -> bool:
    """As the first stream of trainer rank 0. Was it refused?"""
    with contextlib.suppress(SyncError):
        connection = Connection.to(address, "it", seal, Hello("trainer rank 0 on trainers", 0, 1), 5.0)
        connection.wait_for(Kind.GO)
        return False
    return True
