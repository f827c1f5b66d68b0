import msgspec
import pytest
import torch

from verl_mux.sync.wire import Bucket, End, Piece, as_bytes, decode, digest, dtype_name, dtype_of, encode

PIECE = Piece(3, "model.embed_tokens.weight", "bfloat16", (151936, 1024), 1 << 33, 1 << 26, (1 << 64) - 1)


@pytest.mark.parametrize("message", [Bucket(7, 1, [PIECE, PIECE]), Bucket(0, 0, []), End(7, 3, 311, 1 << 40)])
def test_a_message_arrives_as_it_was_sent(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("frame", [b"", b"GET / HTTP/1.1", msgspec.msgpack.encode(["Piece", 1]), encode(End(1, 2, 3, 4))[:-1]])
def test_anything_else_is_refused(frame):
    with pytest.raises(msgspec.DecodeError):
        decode(frame)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_a_tensors_bytes_are_its_memory_and_no_copy(dtype):
    tensor = torch.ones(6, 4).to(dtype)
    view = as_bytes(tensor)
    assert len(view) == tensor.nbytes and dtype_of(dtype_name(dtype)) is dtype
    view[: dtype.itemsize] = bytes(dtype.itemsize)
    assert tensor[0, 0] == 0 and tensor[0, 1] == 1


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(0, 5), torch.tensor(3.0)])
def test_tensors_without_rows_or_dimensions_have_bytes_too(tensor):
    assert len(as_bytes(tensor)) == tensor.nbytes


def test_one_changed_bit_changes_the_digest():
    data = bytearray(100)
    before = digest(data)
    data[57] ^= 4
    assert digest(data) != before
