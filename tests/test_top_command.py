"""`verl-mux top` of a run, of a coordinator, and of both. In a terminal: tests/profiling/live/test_job_states.py."""

import json

import pytest

from tests.profiling.made_engines import make
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
