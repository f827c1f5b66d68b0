"""Blocks of ports: one holder each on a host, and nobody else within."""

from __future__ import annotations

import multiprocessing
import socket

from verl_mux.launcher.cluster import ports
from verl_mux.launcher.cluster.ports import Block

# Blocks from here on are those of the keeper's tests, which may run beside these.
FOR_KEEPERS = 100


def held_block(seed: str, allowed: range = range(FOR_KEEPERS)) -> tuple[Block, int]:
    held = Block()
    return held, next(block for block in ports.blocks(seed) if block in allowed and held.hold(block) is None)


def test_a_block_has_one_holder_until_it_is_released():
    (one, number), other = held_block("test"), Block()
    assert other.hold(number) == ports.FIRST + number * ports.SIZE
    one.release()
    assert other.hold(number) is None
    other.release()


def test_a_block_with_a_port_that_another_uses_is_not_taken():
    held, number = held_block("test")
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports.FIRST + number * ports.SIZE + 3))
        other.listen()
        held.release()
        assert Block().hold(number) == ports.FIRST + number * ports.SIZE + 3
    assert Block().hold(number) is None


def _take(seed: str, start, taken) -> None:
    start.wait()
    held, number = held_block(seed)
    taken.put(number)
    start.wait()  # held until all have theirs
    held.release()


def test_fifty_that_start_at_the_same_moment_have_fifty_blocks():
    context = multiprocessing.get_context("fork")
    start, taken = context.Barrier(50, timeout=60), context.Queue()
    processes = [context.Process(target=_take, args=(str(number), start, taken)) for number in range(50)]
    for process in processes:
        process.start()
    blocks = [taken.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert len(set(blocks)) == 50


def test_all_blocks_lie_below_what_outgoing_connections_get():
    assert sorted(ports.blocks("x")) == list(range((ports.LAST - ports.FIRST) // ports.SIZE))
    assert ports.LAST <= 32_768
