"""How a command is started on a host. The recorders stand for ssh, srun and kubectl: they write down their words and run the rest
here, as the real ones do on the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from verl_mux.launcher.cluster.reach import HostSpec, words

# What each does with the words after its own options.
RUN = {
    "ssh": "os.execvp('sh', ['sh', '-c', ' '.join(rest)])",  # a shell over there gets one line
    "srun": "os.execvp(rest[0], rest)",
    "kubectl": "os.execvp(rest[0], rest)",
}
RECORDER = """#!{python}
import json, os, sys
json.dump(sys.argv, open({out!r}, 'w'))
rest = sys.argv[sys.argv.index('--') + 1 + {skip}:]
{run}
"""


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """Programs of these names in PATH; gives their words as they got them."""

    def make(name: str):
        path = tmp_path / "bin" / name
        path.parent.mkdir()
        skip = 1 if name == "ssh" else 0
        path.write_text(RECORDER.format(python=sys.executable, out=str(tmp_path / "words"), skip=skip, run=RUN[name]))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
        return lambda: json.loads((tmp_path / "words").read_text())

    return make


@pytest.mark.parametrize("via", ["ssh", "srun", "kubectl"])
def test_a_command_arrives_word_for_word_and_with_its_stdin(via, recorder):
    told = recorder(via)
    odd = ["printf", "%s|", "a b", "'$HOME'", '{"x": 1}', "a;b", ""]
    assert subprocess.run(words("h1", HostSpec(via=via), odd), capture_output=True, text=True, check=True).stdout == (
        "a b|'$HOME'|{\"x\": 1}|a;b||"
    )
    assert any("h1" in word for word in told())
    echoed = subprocess.run(words("h1", HostSpec(via=via), ["cat"]), input="secret", capture_output=True, text=True, check=True)
    assert echoed.stdout == "secret"


def test_a_target_of_its_own_is_what_the_program_is_told(recorder):
    assert words("h1", HostSpec(via="kubectl", target="pod/x"), ["true"])[3] == "pod/x"


def test_words_of_ones_own_are_put_before_the_command():
    assert words("h1", HostSpec(via=["nsenter", "-t", "7", "--"]), ["true"]) == ["nsenter", "-t", "7", "--", "true"]
    assert words("h1", HostSpec(via="local"), ["true"]) == ["true"]
