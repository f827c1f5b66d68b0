"""Where Ray itself puts what is asked for, on a cluster of several Ray nodes."""

from __future__ import annotations

import json
import socket
import tempfile

import pytest

pytestmark = pytest.mark.e2e
BIG, SMALL = "127.0.0.3", "127.0.0.2"


@pytest.fixture(scope="module")
def found(forked):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets lie deep in it, and have a limit to their names
        environment = {"VERL_PLATFORM": "cpu", "RAY_TMPDIR": folder, "RAY_ADDRESS": None}
        ended = forked("-m", "tests.places.two_ray_nodes", timeout=300, **environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_what_asks_for_a_node_lands_there_though_ray_would_choose_the_other(found):
    own_choice = found["unbound"]
    assert own_choice in ([BIG], [SMALL])
    assert (found["big"], found["small"]) == ([BIG, BIG], [SMALL] * 4)


def test_ranks_are_on_their_nodes_in_the_order_in_which_verl_counts_them(found):
    assert (found["order"], found["right"]) == (["small", "big"], "right")


def test_a_worker_sees_the_gpu_of_its_node_though_ray_gives_it_none(found):
    assert found["devices"] == [["1", "1"], ["4", "4"]]


def test_of_a_node_without_gpu_ids_the_gpus_are_those_that_its_ray_node_shows(found):
    assert found["seen"] == {"big": [str(gpu) for gpu in range(10, 18)], "small": ["0", "1"]}


def test_a_label_on_the_wrong_host_is_found_before_a_device_is_touched(found):
    assert f"training rank 0 works for node 'small' (host {BIG}), but runs on {socket.gethostname()} ({SMALL}" in found["swapped"]
    assert f"training rank 1 works for node 'big' (host {SMALL}), but runs on {socket.gethostname()} ({BIG}" in found["swapped"]
