"""Real syncs over real ZeroMQ sockets, all ends in one event loop."""

import asyncio
from collections import Counter

import pytest
import torch

pytest.importorskip("verl")
from verl_mux.sync import reception
from verl_mux.sync.engine import MuxCheckpointEngine
from verl_mux.sync.export import Range
from verl_mux.sync.reception import SyncError
from verl_mux.sync.wire import Bucket, End, Piece, as_bytes, digest, encode

torch.manual_seed(0)
MODEL = {
    "embed": torch.randn(501, 33).bfloat16(),
    "norm": torch.randn(7),
    "bias": torch.randn(1),
    "ids": torch.arange(1000),
    "empty": torch.empty(0, 4),
    "head": torch.randn(300, 64),
}
NBYTES = sum(t.nbytes for t in MODEL.values())


class Cluster:
    """Senders and receivers with routes between them; counts what enters each cluster."""

    def __init__(self, senders: int, clusters: list[str], bucket_size: int = 4096, **settings) -> None:
        settings = {"timeout_s": 20.0, **settings}
        self.senders = [MuxCheckpointEngine(bucket_size, **settings) for _ in range(senders)]
        self.receivers = [MuxCheckpointEngine(bucket_size, cluster=name, **settings) for name in clusters]
        ends = [*self.senders, *self.receivers]
        self.metadata = [end.prepare() for end in ends]
        tables = MuxCheckpointEngine.build_topology(senders, len(clusters), self.metadata)
        for group, table in zip((self.senders, self.receivers), tables, strict=True):
            assert all(len(column) == len(group) for column in table.values())
            for i, end in enumerate(group):
                end.init_process_group(**{key: column[i] for key, column in table.items()})

    async def sync(self, version: int, weights=None, consume=None, asked: int | None = None):
        """[what each receiver got], [what each sender says]."""
        weights = weights or (lambda rank: iter(MODEL.items()))
        sending = [end.send_weights(weights(rank), version) for rank, end in enumerate(self.senders)]
        taking = [(consume or take)(end, version if asked is None else asked) for end in self.receivers]
        results = await asyncio.gather(*sending, *taking)
        return results[len(sending) :], results[: len(sending)]

    def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            end._context.destroy(linger=0)


async def take(end: MuxCheckpointEngine, version: int) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in end.receive_weights(version)}


def same(got: dict[str, torch.Tensor], model: dict[str, torch.Tensor] = MODEL) -> bool:
    return list(got) == list(model) and all(
        t.dtype == model[n].dtype and t.shape == model[n].shape and bytes(as_bytes(t)) == bytes(as_bytes(model[n]))
        for n, t in got.items()
    )


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    made = []

    def make(*args, **settings) -> Cluster:
        made.append(Cluster(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_four_receivers_in_two_clusters_get_every_bit_in_order(cluster):
    async def run():
        got, said = await cluster(2, ["a", "a", "b", "b"]).sync(3)
        assert all(same(each) for each in got)
        assert sum(s["mux/sync/sent_bytes"] for s in said) == NBYTES

    asyncio.run(run())


def test_the_model_enters_each_cluster_once(cluster, monkeypatch):
    entered = Counter()
    real = MuxCheckpointEngine._send_all

    async def counted(self, addresses, frames, copy):
        for address in addresses:
            entered[address] += sum(len(bytes(f)) for f in frames[1:])
        await real(self, addresses, frames, copy)

    async def run():
        ends = cluster(3, ["a", "b", "a", "b", "b"])
        monkeypatch.setattr(MuxCheckpointEngine, "_send_all", counted)
        await ends.sync(1)
        for name, size in (("a", 2), ("b", 3)):
            members = [m for m in ends.metadata[3:] if m["cluster"] == name]
            assert sum(entered[m["address"]] for m in members) == NBYTES
            assert sum(entered[m["handoff"]] for m in members) == NBYTES * (size - 1)

    asyncio.run(run())


@pytest.mark.parametrize("bucket_size", [64, 100_000, 1 << 30])
def test_bucket_size_changes_nothing_but_the_frames(cluster, bucket_size):
    async def run():
        got, _ = await cluster(2, ["a", "a"], bucket_size=bucket_size).sync(1)
        assert all(same(each) for each in got)

    asyncio.run(run())


def test_later_syncs_use_the_same_sockets_and_bring_the_newer_weights(cluster):
    async def run():
        ends = cluster(2, ["a", "a", "b"])
        first = [end.prepare() for end in ends.receivers]
        for version in range(1, 4):
            model = {name: tensor + version for name, tensor in MODEL.items()}
            sockets = [dict(end._outboxes) for end in (*ends.senders, *ends.receivers)]
            got, _ = await ends.sync(version, lambda rank, model=model: iter(model.items()))
            assert all(same(each, model) for each in got)
            if version > 1:
                assert [dict(end._outboxes) for end in (*ends.senders, *ends.receivers)] == sockets
        assert [end.prepare() for end in ends.receivers] == first

    asyncio.run(run())


def test_ranks_that_export_rows_need_not_hold_a_row_of_every_tensor(cluster):
    def rows(rank: int):
        """Rank 0 holds the even tensors whole, rank 1 the odd ones; both name all."""
        for i, (name, tensor) in enumerate(MODEL.items()):
            data = tensor if i % 2 == rank else tensor.reshape(-1)[:0]
            yield Range(name, tensor.dtype, tuple(tensor.shape), 0, data)

    async def run():
        ends = cluster(2, ["a", "a"], bucket_size=256)
        for version in range(5):
            got, _ = await ends.sync(version, rows)
            assert all(same(each) for each in got)

    asyncio.run(run())


def test_many_ranks_may_feed_few_workers_that_hand_on_to_each_other(cluster):
    # More messages in flight between the two workers than their queues hold: neither may wait for the other to read first.
    async def run():
        big = {f"t{i}": torch.randint(0, 255, (4 << 20,), dtype=torch.uint8) for i in range(12)}
        got, _ = await cluster(8, ["a", "a"], bucket_size=1 << 20, verify=False).sync(1, lambda rank: iter(big.items()))
        assert all(same(each, big) for each in got)

    asyncio.run(run())


def test_consumers_may_wait_for_each_other_at_every_tensor(cluster, monkeypatch):
    # As the engines of one tensor-parallel group do. With room for next to nothing before the consumer.
    monkeypatch.setattr(reception, "READY_BYTES", 1)
    waiting: dict[str, list[asyncio.Future]] = {}

    async def meet(name: str, parties: int) -> None:
        here = asyncio.get_running_loop().create_future()
        waiting.setdefault(name, []).append(here)
        if len(waiting[name]) == parties:
            for each in waiting[name]:
                each.set_result(None)
        await here

    async def together(end, version):
        got = {}
        async for name, tensor in end.receive_weights(version):
            await meet(name, 3)
            got[name] = tensor
        return got

    async def run():
        model = {f"t{i}": torch.randint(0, 255, (256 << 10,), dtype=torch.uint8) for i in range(40)}
        ends = cluster(6, ["a", "a", "a"], bucket_size=16 << 10)
        got, _ = await ends.sync(1, lambda rank: iter(model.items()), together)
        assert all(same(each, model) for each in got)

    asyncio.run(run())


class TestErrors:
    @pytest.mark.parametrize("asked", [2, 4])
    def test_another_version_is_an_error_on_every_receiver(self, cluster, asked):
        async def run():
            ends = cluster(1, ["a", "a"], timeout_s=2.0)
            sending = asyncio.ensure_future(ends.senders[0].send_weights(iter(MODEL.items()), 3))
            results = await asyncio.gather(*[take(e, asked) for e in ends.receivers], return_exceptions=True)
            sending.cancel()
            errors = [r for r in results if isinstance(r, SyncError)]
            assert f"waits for weights of version {asked}, the trainer sent 3" in str(errors[0])
            assert len(errors) == 2

        asyncio.run(run())

    def test_a_trainer_that_stops_in_the_middle_is_an_error_within_the_timeout(self, cluster):
        def half(rank):
            yield "embed", MODEL["embed"]
            raise RuntimeError("out of memory")

        async def run():
            ends = cluster(2, ["a", "a"], timeout_s=0.5)
            sending = [end.send_weights(half(rank), 1) for rank, end in enumerate(ends.senders)]
            results = await asyncio.gather(*sending, *[take(e, 1) for e in ends.receivers], return_exceptions=True)
            assert [type(r) for r in results] == [RuntimeError, RuntimeError, SyncError, SyncError]
            assert "no weights arrived for 0.5 s" in str(results[-1])

        asyncio.run(run())

    def test_a_receiver_that_does_not_take_is_an_error_for_the_sender(self, cluster):
        async def run():
            ends = cluster(1, ["a"], timeout_s=0.5, bucket_size=1 << 20)
            big = {f"t{i}": torch.zeros(4 << 20, dtype=torch.uint8) for i in range(16)}
            with pytest.raises(SyncError, match="took no weights for 0.5 s"):
                await ends.senders[0].send_weights(iter(big.items()), 1)

        asyncio.run(run())

    def test_damaged_bytes_are_an_error(self, cluster, monkeypatch):
        async def run():
            ends = cluster(1, ["a"])
            monkeypatch.setattr("verl_mux.sync.engine.digest", lambda payload: 1)
            with pytest.raises(SyncError, match="arrived damaged"):
                await ends.sync(1)

        asyncio.run(run())

    def test_what_is_no_weight_sync_is_refused(self, cluster):
        async def run():
            ends = cluster(1, ["a"])
            await ends.senders[0]._outbox(ends.metadata[1]["address"]).send_multipart([ends.senders[0]._seal.put(b"hello")])
            with pytest.raises(SyncError, match="no weight sync"):
                await take(ends.receivers[0], 1)

        asyncio.run(run())

    def test_weights_of_strangers_are_passed_over(self, cluster):
        """Well-formed ones, from another job and from who has no key at all, on the sockets for trainers and for peers."""

        async def run():
            ends, others = cluster(1, ["a", "a"]), cluster(1, ["a"])
            stranger, lie = others.senders[0], [End(1, 0, 0, 0)]
            piece = Piece(0, "embed", "bfloat16", (501, 33), 0, 4, digest(b"evil"))
            lie.append(Bucket(1, 0, [piece]))
            for where in (ends.metadata[1]["address"], ends.metadata[2]["handoff"]):
                for message in lie:
                    for header in (stranger._seal.put(encode(message)), encode(message), b""):
                        await stranger._outbox(where).send_multipart([header, b"evil"])
            got, _ = await ends.sync(1)
            assert all(same(each) for each in got)

        asyncio.run(run())

    def test_a_consumer_that_gives_up_leaves_no_task_behind(self, cluster):
        async def run():
            ends = cluster(1, ["a"])
            sending = asyncio.ensure_future(ends.senders[0].send_weights(iter(MODEL.items()), 1))
            weights = ends.receivers[0].receive_weights(1)
            await anext(weights)
            await weights.aclose()
            await sending
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(run())
