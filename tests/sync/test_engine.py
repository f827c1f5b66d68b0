"""Real syncs over real sockets, all ends in one process."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")
from tests.in_loop import in_loop
from verl_mux.errors import UserError
from verl_mux.sync import engine as engine_module
from verl_mux.sync.engine import MuxCheckpointEngine, figures, raise_failure, settled
from verl_mux.sync.export import Range, as_bytes
from verl_mux.sync.layout import Lost, SyncError

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
    """Trainer ranks on a machine of their own, and workers on these machines."""

    def __init__(self, monkeypatch, senders: int, machines: list[str], bucket_size: int = 4096, **settings) -> None:
        settings = {"timeout_s": 20.0, **settings}
        self.senders = [MuxCheckpointEngine(bucket_size, is_master=not rank, **settings) for rank in range(senders)]
        self.receivers = [MuxCheckpointEngine(bucket_size, **settings) for _ in machines]
        self.metadata = []
        for end, machine in zip([*self.senders, *self.receivers], ["trainers"] * senders + machines, strict=True):
            monkeypatch.setattr(engine_module, "this_machine", lambda machine=machine: machine)
            monkeypatch.setattr("socket.gethostname", lambda machine=machine: machine)
            self.metadata.append(end.prepare())
        self.join()

    def join(self) -> None:
        tables = MuxCheckpointEngine.build_topology(len(self.senders), len(self.receivers), self.metadata)
        for group, table in zip((self.senders, self.receivers), tables, strict=True):
            assert all(len(column) == len(group) for column in table.values())
            for i, end in enumerate(group):
                end.init_process_group(**{key: column[i] for key, column in table.items()})

    async def sync(self, version: int, weights=None, consume=None, asked: int | None = None, outcomes: bool = False):
        """[what each receiver got], [what each sender says]; with `outcomes` errors among them."""
        weights = weights or (lambda rank: iter(MODEL.items()))
        sending = [end.send_weights(weights(rank), version) for rank, end in enumerate(self.senders)]
        taking = [(consume or take)(end, version if asked is None else asked) for end in self.receivers]
        results = await asyncio.gather(*sending, *taking, return_exceptions=outcomes)
        return results[len(sending) :], results[: len(sending)]

    def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            end._end.close()


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
        made.append(Cluster(monkeypatch, *args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("senders", "machines", "bucket_size"),
    [(1, "a", 4096), (3, "abacc", 4096), (2, "aa", 256), (2, "aa", 100_000), (2, "aa", 1 << 30)],
)
@in_loop
async def test_every_worker_gets_every_bit_in_order(cluster, senders, machines, bucket_size):
    got, _ = await cluster(senders, list(machines), bucket_size=bucket_size).sync(3)
    assert all(same(each) for each in got)


def test_two_ray_nodes_on_one_machine_are_one_host(monkeypatch):
    """As of a job that has two of its nodes there."""
    ids = iter(["one", "other"])
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: next(ids)))
    ends = [MuxCheckpointEngine(4096) for _ in range(2)]
    hosts = [end.prepare()["meeting"]["host"] for end in ends]
    for end in ends:
        end._end.close()
    assert hosts[0] == hosts[1]


@in_loop
async def test_later_syncs_use_the_same_memory_and_bring_the_newer_weights(cluster):
    ends = cluster(2, ["a", "a", "b"])
    first = [end.prepare() for end in ends.receivers]
    regions = []
    for version in range(1, 4):
        model = {name: tensor + version for name, tensor in MODEL.items()}
        got, _ = await ends.sync(version, lambda rank, model=model: iter(model.items()))
        assert all(same(each, model) for each in got)
        regions.append([id(end._end._held._region) for end in ends.receivers])
    assert regions[0] == regions[1] == regions[2]
    assert [end.prepare() for end in ends.receivers] == first


@in_loop
async def test_ranks_that_export_rows_need_not_hold_a_row_of_every_tensor(cluster):
    def rows(rank: int):
        """Rank 0 holds the even tensors whole, rank 1 the odd ones; both name all."""
        for i, (name, tensor) in enumerate(MODEL.items()):
            data = tensor if i % 2 == rank else tensor.reshape(-1)[:0]
            yield Range(name, tensor.dtype, tuple(tensor.shape), 0, data)

    ends = cluster(2, ["a", "a"], bucket_size=256)
    for version in range(5):
        got, _ = await ends.sync(version, rows)
        assert all(same(each) for each in got)


@in_loop
async def test_masters_are_cast_at_the_sender_and_tied_weights_go_once(cluster):
    masters = {"embed": torch.randn(300, 7), "norm": torch.randn(5)}

    def ranges(rank: int):
        for name, tensor in masters.items():
            mine = tensor.reshape(-1)[: tensor.numel() if not rank else 0]
            yield Range(name, torch.bfloat16, tuple(tensor.shape), 0, mine)
        yield Range("head", torch.bfloat16, (300, 7), 0, torch.empty(0), tied="embed")

    got, said = await cluster(2, ["a", "b"], bucket_size=64).sync(1, ranges)
    wanted = {name: tensor.bfloat16() for name, tensor in masters.items()}
    assert all(same(each, {**wanted, "head": wanted["embed"]}) for each in got)


@in_loop
async def test_consumers_may_wait_for_each_other_at_every_tensor(cluster):
    # As the engines of one tensor-parallel group do.
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

    model = {f"t{i}": torch.randint(0, 255, (256 << 10,), dtype=torch.uint8) for i in range(40)}
    ends = cluster(6, ["a", "a", "b"], bucket_size=16 << 10)
    got, _ = await ends.sync(1, lambda rank: iter(model.items()), together)
    assert all(same(each, model) for each in got)


def test_an_interface_is_chosen_by_name(cluster):
    async def run():
        ends = cluster(1, ["a"], interface="lo")
        got, _ = await ends.sync(1)
        assert same(got[0]) and ends.metadata[0]["meeting"]["address"][0] == "127.0.0.1"

    asyncio.run(run())
    with pytest.raises(UserError, match=r"mux.sync.interface is 'nic9'; .* has "):
        MuxCheckpointEngine(4096, interface="nic9").prepare()


@in_loop
async def test_a_consumer_that_gives_up_leaves_nothing_behind(cluster):
    async def first_only(end, version):
        weights = end.receive_weights(version)
        await anext(weights)
        await weights.aclose()

    ends = cluster(1, ["a", "b"])
    await ends.sync(1, consume=first_only, outcomes=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    got, _ = await ends.sync(9)
    assert all(same(each) for each in got)


@in_loop
async def test_the_figures_of_a_sync(cluster):
    ends = cluster(2, ["a", "b"])
    _, said = await ends.sync(1)
    assert sum(it["mux/sync/sent_bytes"] for it in said) == 2 * NBYTES
    assert {"mux/sync/gather_seconds", "mux/sync/send_seconds", "mux/sync/stream_gb_per_s"} <= set(said[0])
    received = ends.receivers[0].figures
    assert {"mux/sync/receive_seconds", "mux/sync/load_seconds", "mux/sync/wait_seconds"} <= set(received)
    together = figures([*said, *(end.figures for end in ends.receivers)], 2)
    assert together["mux/sync/bytes"] == sum(it["mux/sync/sent_bytes"] for it in said) and together["ranks"] == 2


def test_a_failed_sync_is_one_error_that_says_what_all_saw():
    with pytest.raises(SyncError, match="^the weight sync failed: r0 has no memory; t0 is gone$"):
        raise_failure([{}, Lost("t0 is gone"), SyncError("r0 has no memory"), Lost("t0 is gone")])
    with pytest.raises(KeyError):
        raise_failure([{}, SyncError("t0 is gone"), KeyError("a fault")])
    raise_failure([{}, None])


@in_loop
async def test_all_who_take_part_in_a_failed_sync_are_waited_for_and_nobody_after_another_error():
    async def ends(outcome, waits: asyncio.Event | None = None):
        if waits is not None:
            await waits.wait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    later, never = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, later.set)
    lost, gone = Lost("t0 is gone"), SyncError("lost")
    assert await settled([ends({}), ends(lost), ends(gone, later)]) == [{}, lost, gone]
    fenced = KeyError("fenced")
    assert await settled([ends({}, never), ends(fenced), ends({}, never)]) == [None, fenced, None]
    never.set()
