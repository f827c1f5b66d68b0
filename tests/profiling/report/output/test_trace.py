"""The trace: the Chrome JSON format, as its document asks (ph X, C, M; microseconds; spans of a thread nest)."""

import json
from collections import defaultdict

import pytest

from tests.profiling.made_logs import Made, make_run, read_run
from tests.profiling.made_mux import make_mux_run
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.trace import _Names, write_trace


@pytest.fixture(scope="module", params=["mux", "plain"])
def trace(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("trace")
    if request.param == "mux":
        make_mux_run(directory / "run", alone=1, together=2)
    else:
        make_run(directory / "run", Made(steps=2, workers=2, requests=12))
    analysis = Analysis(read_run(directory / "run"))
    count = write_trace(analysis, directory / "trace.json")
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    assert len(events) == count
    return analysis, events


def test_every_event_has_what_its_kind_needs(trace):
    needed = {"X": {"name", "cat", "ts", "dur", "pid", "tid"}, "C": {"name", "ts", "pid", "args"}, "M": {"name", "pid", "args"}}
    for event in trace[1]:
        assert set(event) >= needed[event["ph"]]
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        assert all(isinstance(event[key], int) for key in ("pid", "tid") if key in event)


def test_every_process_and_thread_has_a_name(trace):
    named = {(e["pid"], e["tid"]) for e in trace[1] if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in trace[1] if e["ph"] == "M" and e["name"] == "process_name"}
    assert {(e["pid"], e["tid"]) for e in trace[1] if e["ph"] == "X"} <= named
    assert {e["pid"] for e in trace[1]} <= processes


def test_spans_of_one_thread_nest(trace):
    threads = defaultdict(list)
    for event in trace[1]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["ts"] + event["dur"]))
    for spans in threads.values():
        open_ends = []
        for start, _, end in sorted(spans):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_all_requests_turns_and_leases_are_there(trace):
    analysis, events = trace
    names = [event["name"] for event in events]
    assert names.count("request") == analysis.requests.height
    assert sum(name.startswith("turn ") for name in names) == analysis.turns.height
    assert sum(e["ph"] == "X" and e["cat"] == "lease" for e in events) == len(analysis.leases.holds)


def test_spans_that_overlap_by_a_clocks_difference_touch_and_others_get_a_thread_of_their_own():
    names, placed = _Names(), []
    for start, end in ((0, 10_000), (9_500, 20_000), (12_000, 30_000), (12_500, 19_000)):
        event = {"ph": "X", **names.place("nodes", "r0")}
        placed.append((names.fit(event, start, end), event["tid"]))
    assert placed == [((0, 10_000), 1), ((10_000, 20_000), 1), ((12_000, 30_000), 2), ((12_500, 19_000), 1)]
