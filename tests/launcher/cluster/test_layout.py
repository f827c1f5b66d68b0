"""Which raylets a job has where, and what Ray is told of each."""

from __future__ import annotations

import pytest

from verl_mux.coordinator.core.settings import Node
from verl_mux.errors import UserError
from verl_mux.launcher.cluster import layout, ports
from verl_mux.launcher.cluster.layout import RayOptions
from verl_mux.launcher.cluster.reach import HostSpec

HOSTS = {"a": HostSpec(via="local"), "b": HostSpec(via="ssh", address="10.0.0.2")}
NODES = [
    Node(name="t0", host="b", gpus=2, gpu_ids=[2, 3]),
    Node(name="r0", host="a", gpus=8),
    Node(name="r1", host="b", gpu_ids=[0]),
]


def _options(command: list[str]) -> dict[str, str]:
    return dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)


def test_one_part_a_host_and_the_first_nodes_host_leads():
    found = layout.parts(NODES, HOSTS)
    assert [(part.host, [raylet.node for raylet in part.raylets]) for part in found] == [("b", ["t0", "r1"]), ("a", ["r0"])]


def test_each_node_is_a_raylet_with_its_resource_and_its_gpus():
    lead, other = layout.parts(NODES, HOSTS)
    (first, sees), (second, sees_too) = layout.ray_commands(lead, RayOptions(num_cpus=4), 7, "10.0.0.2", None, "/tmp/x")
    head = f"10.0.0.2:{ports.of_services(7, 0, head=True)['port']}"
    assert "--head" in first and _options(first)["resources"] == '{"mux_t0": 1}' and _options(first)["num-gpus"] == "2"
    assert sees == {"VERL_MUX_NODE": "t0", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert sees_too == {"VERL_MUX_NODE": "r1", "CUDA_VISIBLE_DEVICES": "0"}
    assert _options(second)["address"] == head and _options(second)["num-cpus"] == "4"
    ((third, all_of_them),) = layout.ray_commands(other, RayOptions(), 7, "10.0.0.1", head, "/tmp/x")
    assert _options(third)["address"] == head and "num-cpus" not in _options(third) and all_of_them == {"VERL_MUX_NODE": "r0"}


def test_no_two_raylets_of_a_host_share_a_port():
    lead, _ = layout.parts(NODES, HOSTS)
    given = [_options(command) for command, _ in layout.ray_commands(lead, RayOptions(), 0, "10.0.0.2", None, "/tmp/x")]
    used = [value for options in given for name, value in options.items() if name.endswith("port") and value != "0"]
    assert len(used) == len(set(used)) and all(ports.FIRST < int(port) < ports.FIRST + ports.SIZE for port in used)


def test_no_secret_can_stand_in_a_command():
    lead, _ = layout.parts(NODES, HOSTS)
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
        layout.parts(nodes, HOSTS)
