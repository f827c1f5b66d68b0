"""Wrong clocks: their lines are left out, and nothing is found because of them."""

import json
import os
import random
import zlib
from datetime import datetime, timedelta

import pytest

from tests.profiling.made_logs import Made, make_run, read_run
from verl_mux.profiling.report.input import run_log
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import summarise

PLACE = ("step_2", "worker_1.jsonl")


def report(directory):
    return summarise(Analysis(read_run(directory)))


@pytest.fixture(params=["all events", "ends only"])
def healthy(request, tmp_path):
    return make_run(tmp_path, Made(steps=3, workers=4, requests=32, parts=request.param == "all events"))


def changed(directory, change):
    """The log with one worker's step as `change` makes it of its lines (dicts)."""
    path = directory.joinpath(*PLACE)
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return report(directory)


def moved(lines, start, stop, seconds):
    """Lines [start, stop) of a clock that is off by `seconds`."""
    for line in lines[start:stop]:
        line["timestamp"] = (datetime.fromisoformat(line["timestamp"]) + timedelta(seconds=seconds)).isoformat()
    return lines


CLOCKS = {  # how much of the file (as parts of it) was logged by a clock that was off by so much
    "set back for good": [(1 / 2, 1.0, -3600.0)],
    "set back a little for good": [(1 / 2, 1.0, -10.0)],
    "set back for a while": [(1 / 3, 1 / 2, -3600.0)],
    "ahead for a while": [(1 / 3, 1 / 2, 3600.0)],
    "set back twice": [(1 / 3, 1.0, -600.0), (1 / 2, 1.0, -600.0)],
}


@pytest.mark.parametrize("name", CLOCKS)
def test_lines_of_a_clock_set_wrong_are_skipped(healthy, name):
    before = report(healthy)

    def wrong(lines):
        for since, until, seconds in CLOCKS[name]:
            moved(lines, int(since * len(lines)), int(until * len(lines)), seconds)
        return lines

    summary = changed(healthy, wrong)
    assert set(summary["input"]["skipped"]) == {run_log.STRAY} and summary["findings"] == []
    others = [rows for rows in before["completion"]["per_worker"] if (rows["step"], rows["worker"]) != (2, 1)]
    assert [rows for rows in summary["completion"]["per_worker"] if (rows["step"], rows["worker"]) != (2, 1)] == others


@pytest.mark.parametrize(("seconds", "count"), [(-2400.0, 1), (-2400.0, 3), (2400.0, 1), (2400.0, 3), (-60.0, 1)])
def test_stray_lines_are_skipped(healthy, seconds, count):
    before = report(healthy)
    summary = changed(healthy, lambda lines: moved(lines, 12, 12 + count, seconds))
    assert summary["input"]["skipped"] == {run_log.STRAY: count}
    assert summary["input"]["examples"][run_log.STRAY].endswith(os.path.join(*PLACE) + ", line 13")
    assert summary["findings"] == []
    assert before["requests"] - summary["requests"] in range(count + 1)


@pytest.mark.parametrize("zone", ["Z", "+08:00", "-07:00"])
def test_a_line_in_another_zone_is_skipped_unless_it_agrees(healthy, zone):
    def with_zone(lines):
        lines[12]["timestamp"] = "2025-08-11T19:19:45" + zone
        lines[20]["timestamp"] += "Z"
        return lines

    summary = changed(healthy, with_zone)
    assert summary["input"]["skipped"] == {run_log.STRAY: 1}
    assert summary["input"]["examples"][run_log.STRAY].endswith("line 13")
    assert summary["findings"] == []


def test_one_zone_throughout_is_no_fault(healthy):
    for path in healthy.rglob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line | {"timestamp": line["timestamp"] + "+08:00"}) + "\n" for line in lines))
    assert report(healthy)["input"]["skipped"] == {}


def by_request(lines):
    return sorted(lines, key=lambda line: ((line.get("extra") or {}).get("request_id", ""), line["timestamp"]))


def by_threads(lines):
    """Each request's thread writes all its lines late by up to 4 s."""
    late, rng = {}, random.Random(1)

    def written(line):
        name = (line.get("extra") or {}).get("request_id")
        delay = late.setdefault(zlib.crc32(name.encode()) % 4, 4 * rng.random()) if name else 0.0
        return datetime.fromisoformat(line["timestamp"]) + timedelta(seconds=delay)

    return sorted(lines, key=written)


ORDERS = {
    "by request": by_request,
    "by threads": by_threads,
    "backwards": lambda lines: lines[::-1],
    "shuffled": lambda lines: random.Random(2).sample(lines, len(lines)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_lines_in_another_order_keep_their_times(healthy, order):
    before = report(healthy)
    summary = changed(healthy, ORDERS[order])
    assert (summary["skipped_lines"], set(summary["input"]["noticed"]) - {run_log.BELIEVED}) == (0, set())
    assert summary["completion"] == before["completion"]
    assert summary["findings"] == []


def test_a_file_is_judged_as_a_whole_however_many_lines_are_read_at_once(healthy, monkeypatch):
    monkeypatch.setattr(run_log, "PIECE_LINES", 10)
    monkeypatch.setattr(run_log, "MAX_LINE_BYTES", 2000)
    summary = changed(healthy, lambda lines: moved(lines, len(lines) // 2, None, -3600))
    assert (list(summary["input"]["skipped"]), summary["findings"]) == ([run_log.STRAY], [])


@pytest.mark.parametrize("why", ["too large to be read whole", "times are compared across files"])
def test_a_file_that_is_no_workers_whole_keeps_its_times(healthy, monkeypatch, why):
    if why.startswith("too large"):
        monkeypatch.setattr(run_log, "WHOLE_BYTES", 100)
    role = "server" if why.startswith("times") else "rollout"
    noticed = changed(
        healthy, lambda lines: [line | {"role": role} for line in moved(lines, len(lines) // 2, None, -3600)]
    )["input"]["noticed"]  # fmt: skip
    assert noticed[run_log.BELIEVED] == 1
