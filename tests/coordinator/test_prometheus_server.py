"""The coordinator's figures over HTTP."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.prometheus_server import MetricsServer
from verl_mux.coordinator.prometheus_text import prometheus_text
from verl_mux.coordinator.server import Coordinator
from verl_mux.errors import Failure, UserError

POOLS = {"pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}}


def get(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_a_scrape_has_the_coordinators_nodes():
    with Coordinator(make_config(POOLS)) as coordinator:
        server = MetricsServer(lambda: prometheus_text(coordinator.snapshot()), 0, "127.0.0.1")
        with server as port:
            kind, text = get(port)
    assert kind.startswith("text/plain; version=0.0.4")
    assert 'mux_node_busy{pool="rollout",node="r0"} 0\n' in text
    families = text_string_to_metric_families(text)
    assert {"mux_node_busy", "mux_node_queue_length"} <= {family.name for family in families}


def test_a_coordinator_that_stopped_is_a_503():
    def stopped():
        raise Failure("the coordinator is not running")

    with MetricsServer(stopped, 0, "127.0.0.1") as port, pytest.raises(urllib.error.HTTPError) as error:
        get(port)
    assert error.value.code == 503
    assert b"not running" in error.value.read()


def test_other_paths_say_where_the_metrics_are():
    with MetricsServer(str, 0, "127.0.0.1") as port, pytest.raises(urllib.error.HTTPError) as error:
        get(port, "/")
    assert (error.value.code, b"/metrics" in error.value.read()) == (404, True)


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(UserError, match="0 .* to 65535"):
        MetricsServer(str, port, "127.0.0.1")


def test_a_port_in_use_is_refused():
    with MetricsServer(str, 0, "127.0.0.1") as port, pytest.raises(UserError, match="free port"):
        MetricsServer(str, port, "127.0.0.1")


def test_the_command_serves_them_and_says_where(tmp_path):
    (tmp_path / "pools.yaml").write_text(json.dumps(POOLS))
    command = [sys.executable, "-m", "verl_mux", "coordinator", "--config", str(tmp_path / "pools.yaml"), "--no-journal"]
    with subprocess.Popen(
        [*command, "--bind", "tcp://127.0.0.1:0", "--metrics-port", "0"], stderr=subprocess.PIPE, text=True
    ) as served:
        try:
            where = served.stderr.readline()
            assert served.stderr.readline().startswith("verl-mux coordinator at")
            _, text = get(int(where.removeprefix("verl-mux metrics at http://127.0.0.1:").removesuffix("/metrics\n")))
            served.terminate()
            served.communicate(timeout=30)
        finally:
            served.kill()
    assert 'mux_node_busy{pool="train",node="t0"} 0\n' in text and served.returncode == 0
