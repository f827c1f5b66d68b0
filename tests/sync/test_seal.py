"""What carries the job's code is the job's, and nothing else."""

from verl_mux.sync.seal import Seal, new_key


def test_only_who_has_the_key_seals_what_is_taken():
    key = new_key()
    ours, theirs = Seal(key), Seal(new_key())
    assert Seal(key).take(ours.put(b"header")) == b"header"
    for frame in (theirs.put(b"header"), b"header", b"", ours.put(b"header")[:-1], ours.put(b"header") + b"x"):
        assert ours.take(frame) is None
