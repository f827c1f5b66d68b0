"""The coordinator's figures over HTTP, read back by Prometheus's own client library."""

import json
import math
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from verl_mux.coordinator.prometheus import METRICS, Figures, coordinator_samples, serve_metrics
from verl_mux.errors import Failure, UserError

POOLS = {"pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}}


def get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def figures(snapshot):
    return Figures(METRICS, lambda: coordinator_samples(snapshot))


def served(samples, port=0):
    return serve_metrics(Figures(METRICS, samples), port, "127.0.0.1")


def families(text):
    """name -> samples as (labels, value)."""
    read = text_string_to_metric_families(text)
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in read}


def test_a_coordinator_that_stopped_is_a_503():
    def stopped():
        raise Failure("the coordinator is not running")

    with served(stopped) as port, pytest.raises(urllib.error.HTTPError) as error:
        get(port)
    assert error.value.code == 503
    assert b"not running" in error.value.read()


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(UserError, match="0 .* to 65535"), served(tuple, port):
        pass


def test_a_port_in_use_is_refused():
    with served(tuple) as port, pytest.raises(UserError, match="free port"), served(tuple, port):
        pass


def test_the_command_serves_them_and_says_where(tmp_path):
    (tmp_path / "pools.yaml").write_text(json.dumps(POOLS))
    command = [sys.executable, "-m", "verl_mux", "coordinator", "--config", str(tmp_path / "pools.yaml"), "--no-journal"]
    with subprocess.Popen(
        [*command, "--bind", "tcp://127.0.0.1:0", "--metrics-port", "0"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            where = process.stderr.readline()
            assert process.stderr.readline().startswith("verl-mux coordinator at")
            kind, text = get(int(where.removeprefix("verl-mux metrics at http://127.0.0.1:").removesuffix("/metrics\n")))
            process.terminate()
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert kind.startswith("text/plain; version=0.0.4")
    assert ({"pool": "train", "node": "t0"}, 0) in families(text)["mux_node_busy"] and process.returncode == 0


SNAPSHOT = {
    "token": 12,
    "segment": {"index": 1, "mode": "interleaved", "of": 2},
    "pools": {
        "rollout": {
            "nodes": {
                "r0": {
                    "gpus": 1, "usd_per_hour": None, "bytes": 1000, "peak_bytes": 4000,
                    "holders": [{"job": "a", "phase": "rollout", "step": 3, "token": 12, "held_s": 1.5}],
                    "queue": [{"job": 'b "quoted"\n', "phase": "rollout", "step": 2, "waited_s": 0.25}],
                }
            }
        }
    },
    "jobs": {"a": {"state": "live", "step": 3, "steps_done": 2, "progress": [3, 4], "metrics": {"reward": 0.5, "name": "x"}}},
}  # fmt: skip


def test_a_snapshot_read_back_by_prometheus_own_parser():
    text = generate_latest(figures(SNAPSHOT)).decode()
    seen = families(text)
    node = {"pool": "rollout", "node": "r0"}
    assert seen["mux_segment_index"] == [({"mode": "interleaved"}, 1)]
    assert seen["mux_node_busy"] == [(node, 1)]
    assert seen["mux_lease_held_seconds"] == [(node | {"job": "a", "phase": "rollout"}, 1.5)]
    assert seen["mux_lease_waited_seconds"] == [(node | {"job": 'b "quoted"\n', "phase": "rollout"}, 0.25)]
    assert seen["mux_job_progress"] == [({"job": "a"}, 0.75)]
    assert seen["mux_job_metric"] == [({"job": "a", "name": "reward"}, 0.5)]
    assert seen["mux_lease_token"] == [({}, 12)]
    assert "usd" not in text


@pytest.mark.parametrize("snapshot", [{}, {"pools": {}, "jobs": {}, "segment": None}, {"jobs": {"a": {}}}])
def test_what_a_snapshot_lacks_is_left_out(snapshot):
    generate_latest(figures(snapshot))


def test_numbers_that_are_none_have_prometheus_names():
    text = generate_latest(figures({"jobs": {"a": {"metrics": {"x": math.nan, "y": math.inf}}}})).decode()
    assert "NaN" in text
    assert "+Inf" in text
