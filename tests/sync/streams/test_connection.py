"""One stream: what a header can say."""

import socket
from concurrent.futures import ThreadPoolExecutor

from verl_mux.sync.streams.connection import Connection, Header, Hello, Kind
from verl_mux.sync.streams.seal import Seal, new_key


def test_a_header_tells_the_sizes_of_the_largest_models():
    key, told = new_key(), Header(Kind.ATTACH, number=2**41, nbytes=2**40, source=2**20, digest=2**64 - 1)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        server.settimeout(10.0)
        other = pool.submit(Connection.to, server.getsockname(), "the other", Seal(key), Hello("one", 0, 1), 10.0)
        accepted = Connection.accepted(server.accept()[0], Seal(key), 10.0)
        assert accepted is not None
        other.result(10.0).write(told)
        assert accepted[0].read() == told
