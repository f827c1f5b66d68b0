"""What the page holds of a large run, and texts of requests."""

import base64
import json

import numpy as np
import polars as pl
import pytest

from tests.profiling.made_engines import make
from tests.profiling.made_logs import read_run
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.page import requests
from verl_mux.profiling.report.output.page import requests as texts_module
from verl_mux.profiling.report.output.page.requests import lives, shown, texts

NOTHING = {"findings": []}


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    return Analysis(read_run(make(tmp_path_factory.mktemp("run"), seed=1, steps=3, requests=64, turns=2)))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(requests, "MAX_REQUESTS", 64)
    monkeypatch.setattr(requests, "SLOWEST", 3)


def test_all_are_drawn_where_they_fit(analysis):
    found = shown(analysis, NOTHING)
    assert (found.frame.height, found.of, found.each) == (192, 192, 1)
    assert [lane[:2] for lane in found.replicas] == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]


def test_a_thinned_run_keeps_the_last_of_each_step_and_replica_and_the_slowest(analysis, small):
    found = shown(analysis, NOTHING)
    assert found.each == 3 and found.frame.height < 192 / 2
    last = analysis.requests.group_by("step", "unit").agg(pl.col("end").max()).sort("step", "unit")
    assert found.frame.group_by("step", "unit").agg(pl.col("end").max()).sort("step", "unit").equals(last)
    slowest = analysis.requests.sort("seconds", descending=True).head(3)["request_id"]
    assert slowest.is_in(found.frame["request_id"].to_list()).all()


def test_what_a_finding_names_is_drawn_and_has_its_life_first(analysis, small, monkeypatch):
    monkeypatch.setattr(requests, "MAX_STRETCHES", 12)
    fastest = analysis.requests.sort("seconds")["request_id"][0]
    found = shown(analysis, {"findings": [{"request_id": fastest}]})
    noted = lives(analysis, found)
    assert fastest in noted["names"] and 1 < len(noted["names"]) < found.frame.height
    counts = np.frombuffer(base64.b64decode(noted["counts"]), "<u2")
    assert len(counts) == found.frame.height
    assert counts.sum() == len(base64.b64decode(noted["what"])) <= 12


def with_texts(directory, text):
    """A run in which each request's text was logged, and a torn line."""
    make(directory, seed=1, steps=1, requests=8)
    for path in directory.rglob("rollout/step_1/*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        ends = [line for line in lines if line["event"] == "async_rollout_request_complete"]
        noted = [end | {"event": "request_text", "extra": {"request_id": end["extra"]["request_id"], **text}} for end in ends]
        added = [json.dumps(line) for line in noted]
        path.write_text(path.read_text() + "\n".join([*added, added[0][:-20]]) + "\n")
    analysis = Analysis(read_run(directory))
    return analysis, shown(analysis, {"findings": []})


def test_each_request_has_its_text(tmp_path):
    analysis, found = with_texts(tmp_path, {"prompt": "2 + 2", "response": "4", "left_out": 3})
    assert texts(analysis.run, found) == {str(index): ("2 + 2", "4", 3) for index in range(8)}


def test_the_slowest_come_first_where_there_is_no_room_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(texts_module, "MAX_TEXT_BYTES", 250)
    analysis, found = with_texts(tmp_path, {"prompt": "x" * 60, "response": "y" * 40})
    slowest = found.frame.sort("seconds", descending=True)["index"].head(2).to_list()
    assert set(texts(analysis.run, found)) == {str(index) for index in slowest}


def test_a_log_that_has_gone_has_no_texts(tmp_path):
    analysis, found = with_texts(tmp_path, {"prompt": "2 + 2"})
    for file in tmp_path.rglob("*.jsonl"):
        file.unlink()
    assert texts(analysis.run, found) == {}
