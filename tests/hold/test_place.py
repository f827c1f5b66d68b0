"""Which nodes a command may hold, and what it is noted of them."""

import socket

import pytest

from verl_mux import hold
from verl_mux.coordinator.bus.client import Lease, LocalMux
from verl_mux.errors import UserError
from verl_mux.places.place import Place


class Placed(LocalMux):
    """Nodes of which a coordinator would tell: host, GPU ids and cores by name."""

    def __init__(self, nodes):
        super().__init__("sums", {"train": list(nodes)}, filler=True)
        self.about = nodes

    def place(self, node):
        return Place(**self.about[node])


def lease(*nodes):
    return Lease(token=7, nodes=list(nodes), phase="train", step=0, waited_s=0.0, granted_at=0.0)


HERE = socket.gethostname()
NODES = Placed(
    {
        "t0": {"host": "127.0.0.1", "gpu_ids": [0, 1], "cpus": [0]},
        "t1": {"host": "127.0.0.1", "gpu_ids": [2, 3], "cpus": [1]},
        "t2": {"host": HERE},
        "t3": {"host": "host.invalid", "gpu_ids": [0, 1]},
        "t4": {},
    }
)


def test_it_holds_nodes_of_its_own_host_and_those_without_a_host():
    assert hold.reachable(NODES, "train", 1) == ["t0", "t1", "t2", "t4"]


@pytest.mark.parametrize("number", [0, 5])
def test_more_nodes_than_there_are_are_refused_with_where_they_are(number):
    with pytest.raises(UserError, match=rf"--nodes is {number}.*4 nodes on.*t3 on host.invalid"):
        hold.reachable(NODES, "train", number)


def test_gpus_of_one_host_are_made_the_visible_ones():
    noted = hold.environment(NODES, lease("t0", "t1"))
    assert noted["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert (noted[hold.NODES], noted[hold.GPU_IDS], noted[hold.TOKEN]) == ("t0,t1", "0,1;2,3", "7")
    assert hold.cpus(NODES, lease("t0", "t1")) == [0, 1]


@pytest.mark.parametrize("nodes", [("t0", "t3"), ("t2",), ("t4",)], ids=["two hosts", "GPUs not named", "nothing named"])
def test_otherwise_the_visible_gpus_are_left_to_the_command(nodes):
    assert "CUDA_VISIBLE_DEVICES" not in hold.environment(NODES, lease(*nodes))
    assert hold.cpus(NODES, lease(*nodes)) is None
