"""What travels in a weight sync: pieces of tensors in multipart ZeroMQ frames, [header, payload, payload, ...].

A piece is a contiguous byte range of one tensor. Tensors are numbered in the order in which every rank exports them, so receivers
can hand them on in that order (the engine's own collectives need the same order on every worker).
"""

from __future__ import annotations

import msgspec
import torch
import xxhash


class Piece(msgspec.Struct, array_like=True):
    """`offset`: first byte of the full tensor that the payload covers; `digest`: xxh3-64 of the payload, 0 when not verified."""

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: int = 0


class Bucket(msgspec.Struct, array_like=True, tag=True):
    """Some pieces of version `version` from trainer rank `rank`; their payloads follow in the same order."""

    version: int
    rank: int
    pieces: list[Piece]


class End(msgspec.Struct, array_like=True, tag=True):
    """Rank `rank` has sent all its pieces: `tensors` in the model, `nbytes` from this rank."""

    version: int
    rank: int
    tensors: int
    nbytes: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Bucket | End)


def encode(message: Bucket | End) -> bytes:
    return _encoder.encode(message)


def decode(header: bytes) -> Bucket | End:
    """Raises msgspec.DecodeError for anything that is not one of ours."""
    return _decoder.decode(header)


def digest(payload) -> int:
    """xxh3-64 of a bytes-like object."""
    return xxhash.xxh3_64_intdigest(payload)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes without a copy; it must be contiguous and on the host."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)
