"""What the ranks export is the whole model, every byte once: real FSDP2 shards, and every mesh in a world without links."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl_mux.sync.export import Range, as_bytes, row_shards, stripe, stripes

torch.manual_seed(0)
FULL = {
    "embed": torch.randn(7, 4),
    "norm": torch.randn(3),
    "bias": torch.randn(1),
    "square": torch.randn(8, 2, 3),
    "buffer": torch.arange(5),
}


def local_of(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def exported(params: dict[str, torch.Tensor], rank: int, dtype: torch.dtype = torch.float32) -> list[Range]:
    return list(row_shards([(name, p, local_of(p)) for name, p in params.items()], dtype, rank))


def assembled(ranks: list[list[Range]]) -> dict[str, torch.Tensor]:
    """The full tensors of all ranks' ranges; every byte written exactly once."""
    whole, written = {}, {}
    for ranges in ranks:
        for r in ranges:
            tensor = whole.setdefault(r.name, torch.empty(r.shape, dtype=r.dtype))
            count = written.setdefault(r.name, torch.zeros(tensor.nbytes, dtype=torch.int))
            assert r.data.is_contiguous() and not r.data.requires_grad
            as_bytes(tensor)[r.offset : r.offset + r.nbytes] = r.read(0, r.nbytes)
            count[r.offset : r.offset + r.nbytes] += 1
    assert all(count.eq(1).all() for count in written.values())
    return whole


@contextlib.contextmanager
def as_rank(rank: int, *shape: int) -> Iterator[DeviceMesh]:
    """A mesh of this shape as `rank` sees it, without any other process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


def shard(full: torch.Tensor, mesh: DeviceMesh, *placements) -> DTensor:
    """`full` on this rank of `mesh`, sharded as FSDP2 does, on the mesh's last dimension."""
    if placements[-1].is_shard():
        dim = placements[-1].dim
        parts = list(full.chunk(mesh.size(mesh.ndim - 1), dim=dim))
        at = mesh.get_coordinate()[-1]
        local = parts[at] if at < len(parts) else full.narrow(dim, 0, 0)
    else:
        local = full
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )  # fmt: skip


class TestRowShards:
    @pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
    def test_all_ranks_together_send_every_byte_once(self, size):
        ranks = []
        for rank in range(size):
            with as_rank(rank, size) as mesh:
                ranks.append(exported({n: shard(t, mesh, Shard(0)) for n, t in FULL.items()}, rank))
        assert all(tensor.equal(FULL[name]) for name, tensor in assembled(ranks).items())

    def test_of_ranks_that_hold_the_same_rows_one_sends_them(self):
        # verl's fsdp_size below the world size: copies of the model over the first dimension of the mesh
        ranks = []
        for rank in range(6):
            with as_rank(rank, 2, 3) as mesh:
                ranks.append(exported({n: shard(t, mesh, Replicate(), Shard(0)) for n, t in FULL.items()}, rank))
        assert all(tensor.equal(FULL[name]) for name, tensor in assembled(ranks).items())
        assert all(r.data.numel() == 0 for ranges in ranks[3:] for r in ranges)

    def test_plain_and_replicated_parameters_come_from_the_first_rank(self):
        ranks = []
        for rank in range(3):
            with as_rank(rank, 3) as mesh:
                ranks.append(exported({"plain": FULL["embed"], "copied": shard(FULL["norm"], mesh, Replicate())}, rank))
        whole = assembled(ranks)
        assert whole["plain"].equal(FULL["embed"]) and whole["copied"].equal(FULL["norm"])
        assert [len(ranges) for ranges in ranks] == [2, 2, 2], "every rank names every tensor, so that all count alike"

    def test_floating_point_is_cast_to_the_rollouts_type_and_nothing_else(self):
        with as_rank(0, 1) as mesh:
            ranges = exported({n: shard(t, mesh, Shard(0)) for n, t in FULL.items()}, 0, torch.bfloat16)
        whole = assembled([ranges])
        assert whole["embed"].equal(FULL["embed"].bfloat16()) and whole["buffer"].equal(FULL["buffer"])

    @pytest.mark.parametrize("shape", [(0,), (0, 4), ()])
    def test_tensors_without_rows_or_dimensions_are_exported_too(self, shape):
        tensor = torch.ones(shape)
        (only,) = exported({"t": tensor}, 0)
        assert (only.shape, only.offset, only.data.numel()) == (shape, 0, tensor.numel())

    def test_parameters_that_need_gradients_are_exported_without(self):
        assert not exported({"w": torch.nn.Parameter(torch.ones(2, 2))}, 0)[0].data.requires_grad

    @pytest.mark.parametrize("placements", [[Shard(1)], [Shard(0), Shard(0)], [Shard(0), Shard(1)]])
    def test_other_shards_than_rows_are_refused_by_name(self, placements):
        with as_rank(0, *([2] * len(placements))) as mesh:
            param = DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)
            with pytest.raises(ValueError, match=r"proj has placements .* rows \(dimension 0\) only"):
                exported({"proj": param}, 0)


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1))


def _export_as_fsdp_rank(rank: int, directory: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    model = _model()
    fully_shard(model[1])
    fully_shard(model)
    ranges = exported(model.state_dict(), rank, torch.bfloat16)
    torch.save([tuple(r) for r in ranges], f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def test_two_real_fsdp2_ranks_export_the_model_between_them(tmp_path: Path):
    mp.start_processes(_export_as_fsdp_rank, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
    ranks = [[Range(*r) for r in torch.load(tmp_path / f"{rank}.pt")] for rank in (0, 1)]
    whole, expected = assembled(ranks), _model().state_dict()
    assert list(whole) == list(expected)
    assert all(tensor.equal(expected[name].bfloat16()) for name, tensor in whole.items())
    sent = [sum(r.nbytes for r in ranges) for ranges in ranks]
    assert sum(sent) == sum(t.numel() * 2 for t in expected.values()) and min(sent) > 0


class TestStripes:
    @pytest.mark.parametrize("ranks", [1, 2, 3, 8])
    def test_all_ranks_together_send_every_byte_once(self, ranks):
        full = {**FULL, "empty": torch.empty(0, 3), "scalar": torch.tensor(2.0), "flag": torch.tensor([True, False])}
        full["transposed"] = torch.randn(4, 6).t()
        assert all(t.equal(full[n]) for n, t in assembled([list(stripes(full.items(), r, ranks)) for r in range(ranks)]).items())

    def test_every_rank_draws_every_tensor_since_making_one_may_take_all_ranks(self):
        drawn = []

        def weights():
            for name, tensor in FULL.items():
                drawn.append(name)
                yield name, tensor

        assert [r.name for r in stripes(weights(), 7, 8)] == drawn == list(FULL)

    def test_a_tensor_that_comes_twice_is_sent_once_and_all_are_drawn(self):
        twice = iter([("embed", torch.ones(4)), ("norm", torch.ones(2)), ("embed", torch.zeros(4))])
        found = list(stripes(twice, 0, 1))
        assert [r.name for r in found] == ["embed", "norm"] and found[0].data.eq(1).all() and next(twice, None) is None

    @given(nbytes=st.integers(0, 10_000), ranks=st.integers(1, 33), align=st.sampled_from([1, 16, 64]))
    def test_they_are_aligned_even_and_cover_every_byte_once(self, nbytes, ranks, align):
        cuts = [stripe(nbytes, rank, ranks, align) for rank in range(ranks)]
        assert cuts[0][0] == 0 and cuts[-1][1] == nbytes
        assert all(a[1] == b[0] for a, b in zip(cuts, cuts[1:], strict=False))
        assert all(start % align == 0 or start == nbytes for start, _ in cuts)
        sizes = [end - start for start, end in cuts]
        assert max(sizes) - min(sizes) < 2 * align


class TestCasts:
    def test_a_cast_piece_keeps_its_bytes_while_it_is_held_and_then_its_memory_serves_the_next(self):
        numbers = torch.randn(4 << 20)
        whole = Range("w", torch.bfloat16, (4 << 20,), 0, numbers)
        expected, piece = as_bytes(numbers.bfloat16()), 2 << 20
        held = whole.read(0, piece)
        others = [whole.read(start, start + piece) for start in range(piece, 4 * piece, piece)]
        assert held == expected[:piece] and all(other == expected[(at + 1) * piece :][:piece] for at, other in enumerate(others))
        addresses = {address(view) for view in (held, *others)}
        assert len(addresses) == 4
        last = held[piece // 2 :]
        del held, others
        assert address(again := whole.read(piece, 2 * piece)) in addresses and again == expected[piece : 2 * piece]
        assert last == expected[piece // 2 : piece] and address(last) - piece // 2 != address(again)

    @given(start=st.integers(0, 3000), nbytes=st.integers(0, 3000))
    def test_any_run_of_bytes_is_that_of_the_whole(self, start, nbytes):
        numbers = torch.arange(3000, dtype=torch.float32)
        end = min(start + nbytes, 6000)
        assert Range("w", torch.bfloat16, (3000,), 0, numbers).read(start, end) == as_bytes(numbers.bfloat16())[start:end]


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()
