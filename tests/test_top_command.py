"""`verl-mux top` of a run, of a coordinator, and of both. In a terminal: tests/profiling/live/test_terminal.py."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.profiling.made_engines import Job, Made, make
from verl_mux.coordinator.bus import curve_keys as keys
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator

CONFIG = make_config({"pools": {"rollout": {"nodes": [{"name": "r0"}]}}})


@pytest.fixture
def coordinator():
    with Coordinator(CONFIG) as service:
        yield service


def test_of_a_run_it_prints_one_object_and_asks_nobody(run_main, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_MUX_COORDINATOR", "tcp://127.0.0.1:9")
    make(tmp_path / "run", seed=1, steps=2, requests=24)
    code, out, err = run_main("top", tmp_path / "run", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and set(found) == {"now", "jobs", "replicas"} and len(found["replicas"]) == 4


def test_without_a_directory_a_coordinator_is_asked(run_main, coordinator, monkeypatch):
    code, out, _ = run_main("top", "--coordinator", coordinator.address, "--json")
    assert code == 0 and json.loads(out)["coordinator"]["pools"]["rollout"]["nodes"].keys() == {"r0"}
    monkeypatch.setenv("VERL_MUX_COORDINATOR", coordinator.address)
    code, out, _ = run_main("top", "--once")
    assert code == 0 and coordinator.address in out and "r0" in out


def test_both_side_by_side(run_main, coordinator, tmp_path):
    make(tmp_path / "run", seed=1, steps=2, requests=24)
    code, out, _ = run_main("top", tmp_path / "run", "--address", coordinator.address, "--json")
    assert code == 0 and set(json.loads(out)) == {"coordinator", "now", "jobs", "replicas"}


def test_refused_or_unanswered_is_one_line(run_main, coordinator, tmp_path):
    keys.make(tmp_path / "others")
    code, out, err = run_main("top", "--coordinator", coordinator.address, "--keys", tmp_path / "others", "--json")
    assert (code, out, len(err.splitlines())) == (2, "", 1) and "key" in err
    code, out, err = run_main("top", "--coordinator", "tcp://127.0.0.1:9", "--once")
    assert (code, out) == (2, "") and err.startswith("verl-mux: no coordinator answers at tcp://127.0.0.1:9")


def scraped(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return {family.name: family.samples for family in text_string_to_metric_families(answer.read().decode())}


def test_prometheus_gets_what_the_run_does_now_until_it_is_told_to_end(tmp_path):
    make(tmp_path / "run", seed=1, steps=2, requests=24)
    command = [sys.executable, "-m", "verl_mux", "top", str(tmp_path / "run"), "--metrics-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        try:
            said = served.stderr.readline()
            assert said.startswith("verl-mux metrics at http://127.0.0.1:") and said.endswith("/metrics\n")
            port = int(said.rpartition(":")[2].partition("/")[0])
            before = scraped(port)
            Made(tmp_path / "run", Job(seed=2, steps=1, requests=6, replicas=1), name="b")
            after = scraped(port)
            served.send_signal(signal.SIGTERM)
            out, err = served.communicate(timeout=30)
        finally:
            served.kill()
    assert {sample.labels["replica"] for sample in before["mux_top_replica_step"]} == {"0", "1", "2", "3"}
    assert {sample.labels["job"]: sample.value for sample in after["mux_top_job_step"]} == {"a": 2, "b": 1}
    assert (served.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("more", [[], ["DIR", "--json"], ["DIR", "--once"]])
def test_metrics_of_no_run_or_of_one_look_are_refused(run_main, tmp_path, more):
    given = [tmp_path if it == "DIR" else it for it in more]
    code, out, err = run_main("top", *given, "--metrics-port", "0")
    assert (code, out, len(err.splitlines())) == (2, "", 1) and "--metrics-port" in err and "DIRECTORY" in err


def test_a_port_in_use_is_one_line(run_main, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = run_main("top", tmp_path, "--metrics-port", taken.getsockname()[1])
    assert (code, out, len(err.splitlines())) == (2, "", 1) and "name a free port" in err
