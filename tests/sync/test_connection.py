"""Headers hold the sizes of the largest models, and codes that only the job's processes make, each for one connection."""

import socket
from concurrent.futures import ThreadPoolExecutor

from verl_mux.sync.connection import Connection, Header, Hello, Kind, Seal, new_key


def test_a_header_tells_the_sizes_of_the_largest_models():
    key, noted = new_key(), Header(Kind.ATTACH, number=2**41, nbytes=2**40, source=2**20, digest=2**64 - 1)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        server.settimeout(10.0)
        other = pool.submit(Connection.to, server.getsockname(), "the other", Seal(key), Hello("one", 0, 1), 10.0)
        accepted = Connection.accepted(server.accept()[0], Seal(key), 10.0)
        assert accepted is not None
        other.result(10.0).write(noted)
        assert accepted[0].read() == noted


def test_only_who_has_the_key_makes_the_code():
    key = new_key()
    code = Seal(key).code(b"header", b"body")
    assert Seal(key).is_ours(code, b"header", b"body")
    for seal, given, parts in [
        (Seal(new_key()), code, (b"header", b"body")), (Seal(key), code, (b"headerbody",)),
        (Seal(key), code, (b"header", b"bodi")), (Seal(key), code[:-1], (b"header", b"body")),
        (Seal(key), b"", (b"header", b"body")),
    ]:  # fmt: skip
        assert not seal.is_ours(given, *parts)


def test_what_is_ours_on_one_connection_is_not_on_another():
    key = Seal(new_key())
    one, other = key.of_connection(b"nonce 1", b"hello"), key.of_connection(b"nonce 2", b"hello")
    assert not other.is_ours(one.code(b"header"), b"header")
