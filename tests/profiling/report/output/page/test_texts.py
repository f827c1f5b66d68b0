"""Texts of requests are read again from the log, no more of them than a page should hold."""

import json

from tests.profiling.made_engines import make
from tests.profiling.made_logs import read_run
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.page import requests as texts_module
from verl_mux.profiling.report.output.page.requests import shown, texts


def with_texts(directory, text):
    """A run in which each request's text was logged, and a torn line."""
    make(directory, seed=1, steps=1, requests=8)
    for path in directory.rglob("rollout/step_1/*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        ends = [line for line in lines if line["event"] == "async_rollout_request_complete"]
        told = [end | {"event": "request_text", "extra": {"request_id": end["extra"]["request_id"], **text}} for end in ends]
        added = [json.dumps(line) for line in told]
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
