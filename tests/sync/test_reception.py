"""Pieces in any order become the tensors that were sent, and anything else is an error, never a tensor with a hole."""

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from verl_mux.sync.reception import Assembly, SyncError
from verl_mux.sync.wire import Bucket, End, Piece, as_bytes, digest, dtype_name

VERSION = 4


def cut(index: int, name: str, tensor: torch.Tensor, *cuts: int) -> list[tuple[Piece, bytes]]:
    """The tensor's bytes, cut at these offsets."""
    data, bounds = bytes(as_bytes(tensor)), [0, *cuts, tensor.nbytes]
    parts = [(start, data[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)]
    shape = tuple(tensor.shape)
    return [(Piece(index, name, dtype_name(tensor.dtype), shape, at, len(p), digest(p)), p) for at, p in parts]


def put(assembly: Assembly, pieces: list[tuple[Piece, bytes]], version: int = VERSION, rank: int = 0) -> None:
    assembly.bucket(Bucket(version, rank, [piece for piece, _ in pieces]), [payload for _, payload in pieces])


def out(assembly: Assembly) -> list[str]:
    return [name for name, _ in assembly.ready()]


@pytest.fixture
def assembly() -> Assembly:
    return Assembly(VERSION, ranks=1, verify=True)


torch.manual_seed(0)
MODEL = [("embed", torch.randn(16, 8)), ("norm", torch.randn(8).bfloat16()), ("head", torch.arange(64).reshape(8, 8))]


class TestOrder:
    def test_tensors_leave_in_export_order_whatever_arrives_first(self, assembly):
        pieces = [cut(i, name, tensor) for i, (name, tensor) in enumerate(MODEL)]
        put(assembly, pieces[2])
        assert out(assembly) == []
        put(assembly, pieces[0])
        assert out(assembly) == ["embed"]
        put(assembly, pieces[1])
        assert out(assembly) == ["norm", "head"]

    def test_a_tensor_leaves_with_its_last_byte(self, assembly):
        first, middle, last = cut(0, "embed", MODEL[0][1], 100, 300)
        put(assembly, [last])
        put(assembly, [first])
        assert out(assembly) == []
        put(assembly, [middle])
        assert out(assembly) == ["embed"]

    @given(seed=st.integers(0, 10_000), ranks=st.integers(1, 4))
    def test_any_cuts_in_any_order_give_back_every_bit(self, seed, ranks):
        order = random.Random(seed)
        assembly, pieces = Assembly(VERSION, ranks, verify=True), []
        for index, (name, tensor) in enumerate(MODEL):
            cuts = sorted({order.randrange(1, tensor.nbytes) for _ in range(order.randrange(5))})
            pieces += cut(index, name, tensor, *cuts)
        order.shuffle(pieces)
        arrived = []
        for piece in pieces:
            put(assembly, [piece], rank=order.randrange(ranks))
            arrived += assembly.ready()
        for rank in range(ranks):
            assert not assembly.complete
            assembly.end(End(VERSION, rank, len(MODEL), 0))
        assert assembly.complete
        assert [name for name, _ in arrived] == [name for name, _ in MODEL]
        assert all(a.equal(b) and a.dtype == b.dtype for (_, a), (_, b) in zip(arrived, MODEL, strict=True))
        assert assembly.nbytes == sum(tensor.nbytes for _, tensor in MODEL)


class TestNothing:
    @pytest.mark.parametrize("shape", [(0,), (0, 8), (4, 0)])
    def test_a_tensor_without_bytes_leaves_in_its_turn_once_for_all_ranks(self, shape):
        assembly = Assembly(VERSION, ranks=2, verify=True)
        empty, embed = torch.empty(shape), MODEL[0][1]
        put(assembly, cut(1, "empty", empty), rank=1)
        assert out(assembly) == []
        put(assembly, [*cut(0, "embed", embed), *cut(1, "empty", empty)])
        assert [(name, tuple(t.shape)) for name, t in assembly.ready()] == [("embed", (16, 8)), ("empty", shape)]
        put(assembly, cut(1, "empty", empty), rank=1)
        assert out(assembly) == []

    def test_a_rank_without_rows_may_speak_after_the_tensor_has_left(self):
        assembly = Assembly(VERSION, ranks=2, verify=True)
        (whole, payload), tensor = cut(0, "norm", MODEL[1][1])[0], MODEL[1][1]
        put(assembly, [(whole, payload)], rank=0)
        assert out(assembly) == ["norm"]
        put(assembly, [(Piece(0, "norm", "bfloat16", tuple(tensor.shape), tensor.nbytes, 0, digest(b"")), b"")], rank=1)
        for rank in (0, 1):
            assembly.end(End(VERSION, rank, 1, 0))
        assert assembly.complete

    def test_a_model_of_no_tensors_is_complete_when_all_ranks_say_so(self):
        assembly = Assembly(VERSION, ranks=2, verify=True)
        assembly.end(End(VERSION, 0, 0, 0))
        assert not assembly.complete
        assembly.end(End(VERSION, 1, 0, 0))
        assert assembly.complete


class TestErrors:
    def test_another_version_is_refused_and_both_are_named(self, assembly):
        with pytest.raises(SyncError, match="waits for weights of version 4, the trainer sent 5"):
            put(assembly, cut(0, *MODEL[0]), version=5)
        with pytest.raises(SyncError, match="waits for weights of version 4, the trainer sent 3"):
            assembly.end(End(3, 0, 1, 0))

    def test_damaged_bytes_are_found_by_name_and_place(self, assembly):
        piece, payload = cut(0, "embed", MODEL[0][1], 100)[1]
        damaged = bytearray(payload)
        damaged[5] ^= 1
        with pytest.raises(SyncError, match=r"embed: bytes 100\.\.512 arrived damaged"):
            put(assembly, [(piece, damaged)])

    def test_unverified_pieces_are_taken_as_they_are(self):
        assembly = Assembly(VERSION, ranks=1, verify=False)
        piece, payload = cut(0, "embed", MODEL[0][1])[0]
        piece.digest = 0
        put(assembly, [(piece, payload)])
        assert out(assembly) == ["embed"]

    def test_a_piece_that_arrives_twice_is_an_error_before_its_tensor_leaves(self, assembly):
        first, second = cut(0, "embed", MODEL[0][1], 256)
        put(assembly, [first])
        with pytest.raises(SyncError, match=r"embed: bytes 0\.\.256 arrived twice"):
            put(assembly, [first])

    def test_and_after_it(self, assembly):
        pieces = cut(0, "embed", MODEL[0][1])
        put(assembly, pieces)
        assert out(assembly) == ["embed"]
        with pytest.raises(SyncError, match="embed arrived twice"):
            put(assembly, pieces)

    @pytest.mark.parametrize("offsets", [(0, 128), (0, 384), (256, 128)])
    def test_halves_that_overlap_never_make_a_tensor(self, assembly, offsets):
        data = bytes(as_bytes(MODEL[0][1]))
        with pytest.raises(SyncError):
            for offset in offsets:
                payload = data[offset : offset + 256]
                put(assembly, [(Piece(0, "embed", "float32", (16, 8), offset, 256, digest(payload)), payload)])
        assert out(assembly) == []

    @pytest.mark.parametrize(
        "change", [{"name": "other"}, {"shape": (8, 16)}, {"dtype": "int32"}, {"offset": 500}, {"offset": -4}, {"nbytes": 8}]
    )
    def test_a_piece_of_another_tensor_shape_or_place_is_refused(self, assembly, change):
        first, (piece, payload) = cut(0, "embed", MODEL[0][1], 400)
        put(assembly, [first])
        for field, value in change.items():
            setattr(piece, field, value)
        with pytest.raises(SyncError, match="is no part of embed"):
            put(assembly, [(piece, payload)])

    def test_missing_bytes_are_an_error_as_soon_as_all_ranks_have_ended(self):
        assembly = Assembly(VERSION, ranks=2, verify=True)
        first, _ = cut(0, "embed", MODEL[0][1], 256)
        put(assembly, [first])
        assembly.end(End(VERSION, 0, 1, 256))
        assert not assembly.complete
        assembly.end(End(VERSION, 1, 1, 0))
        with pytest.raises(SyncError, match="256 bytes of embed did not arrive"):
            assembly.complete  # noqa: B018
        assembly = Assembly(VERSION, ranks=1, verify=True)
        assembly.end(End(VERSION, 0, 3, 0))
        with pytest.raises(SyncError, match="tensor 0 did not arrive"):
            assembly.complete  # noqa: B018

    def test_ranks_that_export_different_models_are_found_out(self):
        assembly = Assembly(VERSION, ranks=2, verify=True)
        put(assembly, cut(0, *MODEL[0]))
        out(assembly)
        assembly.end(End(VERSION, 0, 1, 0))
        assembly.end(End(VERSION, 1, 2, 0))
        with pytest.raises(SyncError, match=r"disagree on the number of tensors: \[1, 2\]"):
            assembly.complete  # noqa: B018
