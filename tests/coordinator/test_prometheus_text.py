"""The Prometheus text, read back by Prometheus's own client library where it is there."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from verl_mux.coordinator.prometheus_text import prometheus_text

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


def test_what_a_person_would_ask_is_in_the_text():
    text = prometheus_text(SNAPSHOT)
    for line in (
        'mux_segment_index{mode="interleaved"} 1',
        'mux_node_busy{pool="rollout",node="r0"} 1',
        'mux_lease_held_seconds{pool="rollout",node="r0",job="a",phase="rollout"} 1.5',
        'mux_lease_waited_seconds{pool="rollout",node="r0",job="b \\"quoted\\"\\n",phase="rollout"} 0.25',
        'mux_job_progress{job="a"} 0.75',
        'mux_job_metric{job="a",name="reward"} 0.5',
    ):
        assert line + "\n" in text
    assert "usd" not in text


def test_prometheus_own_parser_reads_it():
    families = {family.name: family for family in text_string_to_metric_families(prometheus_text(SNAPSHOT))}
    (sample,) = families["mux_lease_waited_seconds"].samples
    assert sample.labels["job"] == 'b "quoted"\n'
    assert families["mux_lease_token"].type == "counter"


@pytest.mark.parametrize("snapshot", [{}, {"pools": {}, "jobs": {}, "segment": None}, {"jobs": {"a": {}}}])
def test_what_a_snapshot_lacks_is_left_out(snapshot):
    prometheus_text(snapshot)


def test_numbers_that_are_none_have_prometheus_names():
    text = prometheus_text({"jobs": {"a": {"metrics": {"x": math.nan, "y": math.inf}}}})
    assert "NaN" in text
    assert "+Inf" in text
