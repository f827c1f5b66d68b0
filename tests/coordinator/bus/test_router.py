"""What a Router takes off the network while nobody reads."""

import asyncio

import zmq

from verl_mux.coordinator.bus import curve_keys as keys
from verl_mux.coordinator.bus import limits
from verl_mux.coordinator.bus.link import connect_to, dealer
from verl_mux.coordinator.bus.router import Router

# What the kernel holds on both sides of a loopback connection, at most, in frames of the size allowed.
IN_THE_KERNEL = 24
MANY = 200


def fill(client: zmq.Socket) -> int:
    """How many of the largest frames go out, while this thread, which is the Router's, reads none."""
    frame = bytes(limits.FRAME_BYTES - 100)
    for count in range(MANY):
        if not client.poll(1_000, zmq.POLLOUT):
            return count
        client.send(frame)
    return MANY


def test_what_a_client_sends_while_nobody_reads_waits_at_the_client():
    address = "tcp://127.0.0.1:0"

    async def sent() -> int:
        connected = asyncio.Event()
        router = Router(address, keys.for_bind(address, None), lambda *_: connected.set(), lambda _: None)
        with zmq.Context() as context:
            client = dealer(context, None, keys.for_address(address, None, keys.JOB))
            client.linger, client.sndhwm = 0, 1
            connect_to(router.address, client)
            client.send(b"")
            await asyncio.wait_for(connected.wait(), 60)
            count = fill(client)
            client.close()
        router.close()
        return count

    assert asyncio.run(sent()) <= limits.UNREAD_PER_CLIENT + IN_THE_KERNEL
