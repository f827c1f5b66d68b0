"""The logs that `verl-mux bench report` makes are read whole, and are of healthy runs."""

import json

import pytest

from bench.made_log import make_log
from tests.profiling.made_logs import read_run
from verl_mux.errors import UserError
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import summarise


@pytest.mark.parametrize(("layout", "replicas"), [("ours", 64), ("sglang", 0)])
def test_a_made_log_is_read_without_a_fault_or_a_finding(tmp_path, layout, replicas):
    events, _ = make_log(tmp_path, 20_000, layout)
    summary = summarise(Analysis(read_run(tmp_path)))
    assert summary["input"]["events"] == events >= 20_000
    assert (summary["skipped_lines"], summary["findings"], len(summary["replicas"])) == (0, [], replicas)


def test_lines_of_our_layout_are_in_order_of_time(tmp_path):
    make_log(tmp_path, 1)
    for path in tmp_path.rglob("*.jsonl"):
        times = [json.loads(line)["timestamp"] for line in path.read_text().splitlines()]
        assert times == sorted(times)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*name another --dir"):
        make_log(tmp_path / "file", 1)
