"""A whole run from its directory: files found, cut into pieces, each read and reduced, the tables merged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from verl_mux.profiling.plain.lines import LogFile
from verl_mux.profiling.report.input.clock import WHOLE_BYTES, Faults
from verl_mux.profiling.report.input.line_reader import Block, read_lines, to_frame
from verl_mux.profiling.report.input.reduction import Tables, reduce_events, told_apart

PIECE_BYTES = 64 * 2**20
PIECE_LINES = 100_000
PARALLEL_BYTES = 256 * 2**20  # below, a second process costs more than it saves


@dataclass
class RunLog:
    """The tables of a run (see reduction.py), its files, and what was wrong with them."""

    directory: Path
    tables: Tables
    files: list[LogFile] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)


@dataclass(frozen=True)
class _Piece:
    file: LogFile
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def read_files(
    directory: str | os.PathLike, files: list[LogFile], processes: int = 1, advance: Callable[[int], None] = lambda nbytes: None
) -> RunLog:
    """Reads some event logs of a run; whatever they hold, it does not raise. `advance` is called with the bytes read.

    With more than one process, call it below `if __name__ == "__main__"`, as multiprocessing asks.
    """
    run = RunLog(Path(directory), _empty(), files)
    parts = []
    for size, tables, faults in _reduced(_pieces(files), processes):
        parts.append(tables)
        run.faults.add(faults)
        advance(size)
    if parts:
        run.tables = told_apart(Tables.merge(parts))
    return run


def _pieces(files: list[LogFile]) -> list[list[_Piece]]:
    """Shares of about PIECE_BYTES: parts of a large file, or many small files together."""
    parts = [
        _Piece(file, start, min(start + PIECE_BYTES, file.size)) for file in files for start in range(0, file.size, PIECE_BYTES)
    ]
    shares: list[list[_Piece]] = []
    room = 0
    for part in parts:
        if room < part.size:
            shares.append([])
            room = PIECE_BYTES
        shares[-1].append(part)
        room -= part.size
    return shares


def _reduced(shares: list[list[_Piece]], processes: int) -> Iterator[tuple[int, Tables, Faults]]:
    """(bytes read, tables, faults) of each share."""
    sizes = [sum(piece.size for piece in share) for share in shares]
    if processes < 2 or sum(sizes) < PARALLEL_BYTES:
        yield from ((size, *_reduce(share)) for size, share in zip(sizes, shares, strict=True))
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:  # polars does not survive a fork
        for size, (tables, faults) in zip(sizes, pool.map(_reduce, shares), strict=True):
            yield size, tables, faults


def _reduce(share: list[_Piece]) -> tuple[Tables, Faults]:
    faults = Faults()
    parts: list[Tables] = []
    blocks: list[Block] = []
    waiting = 0
    for piece in share:
        for block in read_lines(piece.file, piece.start, piece.stop, faults):
            if waiting >= PIECE_LINES and _may_cut(blocks[-1].file, block.file):
                parts.append(_tables(blocks, faults))
                blocks, waiting = [], 0
            blocks.append(block)
            waiting += len(block.lines)
    parts.append(_tables(blocks, faults))
    return Tables.merge(parts), faults


def _may_cut(file: LogFile, following: LogFile) -> bool:
    """A clock is judged by its whole file, unless that is too large."""
    return file != following or file.size > WHOLE_BYTES


def _tables(blocks: list[Block], faults: Faults) -> Tables:
    return reduce_events(to_frame(blocks, faults), [line for block in blocks for line in block.lines])


def _empty() -> Tables:
    return _tables([], Faults())
