"""What no bench can measure is refused in one line, before anything is started."""

import subprocess

import pytest

from bench import memory
from verl_mux.errors import Failure


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("leases --rounds 0", "'--rounds'"),
        ("leases --dir none", "--dir none is no folder"),
        ("load --jobs 2 --seconds 0", "'--seconds'"),
        ("hostile --frames -1", "'--frames'"),
        ("hostile --rate 0", "'--rate'"),
        ("chaos --side-by-side 0", "'--side-by-side'"),
        ("chaos --simulated -2", "'--simulated'"),
        ("log --requests 0", "'--requests'"),
        ("log --turns -1", "'--turns'"),
        ("log --rounds 0", "'--rounds'"),
        ("scheduler --live --jobs 19999 --decisions 2", "jobs + 2 * decisions of at most 19998"),
        ("sync --loopback 0", "'--loopback'"),
        ("rollout --rate nan", "given 'nan'"),
    ],
)
def test_it_is_refused_in_one_line(run_main, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main("bench", *arguments.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1) and words in err


def test_an_engine_that_takes_too_long_is_a_failure(monkeypatch):
    def late(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(Failure, match="the engine did not end within 1500 s"):
        memory.measure(15, 1, 1)
