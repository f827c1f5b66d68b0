"""Which part of a job runs on which host, the `ray start` of each node, and how a command gets there.

The recorders stand for ssh, srun and kubectl: they write down their words and run the rest here, as the real ones do on the host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from verl_mux.coordinator.core.settings import Node
from verl_mux.errors import UserError
from verl_mux.launcher.host_parts import HostSpec, parts, words
from verl_mux.launcher.host_setup import BLOCK_SIZE, FIRST_PORT, Part, RayOptions, Setup, blocks, head_address, ray_commands

HOSTS = {"a": HostSpec(via="local"), "b": HostSpec(via="ssh", address="10.0.0.2")}
NODES = [
    Node(name="t0", host="b", gpus=2, gpu_ids=[2, 3]),
    Node(name="r0", host="a", gpus=8),
    Node(name="r1", host="b", gpu_ids=[0]),
]


def _setup(part: Part, ray: RayOptions | None = None, head: str | None = None) -> Setup:
    return Setup(
        uid="u", ray_token="t", environment={}, keys={}, folder="/tmp/job", ray_folder="/tmp/x", towards="10.0.0.9",
        part=part, ray=ray or RayOptions(), head=head,
    )  # fmt: skip


def _options(command: list[str]) -> dict[str, str]:
    return dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)


def test_one_part_a_host_and_the_first_nodes_host_leads():
    found = parts(NODES, HOSTS)
    assert [(part.host, [raylet.node for raylet in part.raylets]) for part in found] == [("b", ["t0", "r1"]), ("a", ["r0"])]


def test_each_node_is_a_raylet_with_its_resource_and_its_gpus():
    lead, other = parts(NODES, HOSTS)
    (first, sees), (second, sees_too) = ray_commands(_setup(lead, RayOptions(num_cpus=4)), 7, "10.0.0.2")
    head = head_address(7, "10.0.0.2")
    assert "--head" in first and _options(first)["resources"] == '{"mux_t0": 1}' and _options(first)["num-gpus"] == "2"
    assert sees == {"VERL_MUX_NODE": "t0", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert sees_too == {"VERL_MUX_NODE": "r1", "CUDA_VISIBLE_DEVICES": "0"}
    assert _options(second)["address"] == head and _options(second)["num-cpus"] == "4"
    ((third, all_of_them),) = ray_commands(_setup(other, head=head), 7, "10.0.0.1")
    assert _options(third)["address"] == head and "num-cpus" not in _options(third) and all_of_them == {"VERL_MUX_NODE": "r0"}


def test_no_two_raylets_of_a_host_share_a_port():
    lead, _ = parts(NODES, HOSTS)
    given = [_options(command) for command, _ in ray_commands(_setup(lead), 0, "10.0.0.2")]
    used = [value for options in given for name, value in options.items() if name.endswith("port") and value != "0"]
    assert len(used) == len(set(used)) and all(FIRST_PORT < int(port) < FIRST_PORT + BLOCK_SIZE for port in used)


def test_no_secret_can_stand_in_a_command():
    lead, _ = parts(NODES, HOSTS)
    assert not any("uid" in word.lower() or "token" in word for word in lead.command)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([Node(name="t0")], "node 't0' has host None; under `hosts` there are a, b"),
        ([Node(name="t0", host="c")], "node 't0' has host c; under `hosts` there are a, b"),
        ([Node(name=f"t{i}", host="a") for i in range(5)], "host 'a' has 5 nodes of one job; at most 4 are allowed"),
    ],
)
def test_nodes_that_have_no_place_are_refused(nodes, text):
    with pytest.raises(UserError, match=text):
        parts(nodes, HOSTS)


def test_jobs_that_start_together_try_different_blocks_of_ports():
    assert sorted(blocks("one")) == sorted(blocks("two")) == list(range(200))
    assert list(blocks("one")) == list(blocks("one")) != list(blocks("two"))


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
    noted = recorder(via)
    odd = ["printf", "%s|", "a b", "'$HOME'", '{"x": 1}', "a;b", ""]
    assert subprocess.run(words("h1", HostSpec(via=via), odd), capture_output=True, text=True, check=True).stdout == (
        "a b|'$HOME'|{\"x\": 1}|a;b||"
    )
    assert any("h1" in word for word in noted())
    echoed = subprocess.run(words("h1", HostSpec(via=via), ["cat"]), input="secret", capture_output=True, text=True, check=True)
    assert echoed.stdout == "secret"


def test_a_target_of_its_own_is_what_the_program_is_told(recorder):
    assert words("h1", HostSpec(via="kubectl", target="pod/x"), ["true"])[3] == "pod/x"


def test_words_of_ones_own_are_put_before_the_command():
    assert words("h1", HostSpec(via=["nsenter", "-t", "7", "--"]), ["true"]) == ["nsenter", "-t", "7", "--", "true"]
    assert words("h1", HostSpec(via="local"), ["true"]) == ["true"]
