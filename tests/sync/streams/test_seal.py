"""What carries the job's code is the job's, and of this connection, and nothing else."""

from verl_mux.sync.streams.seal import Seal, new_key


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
