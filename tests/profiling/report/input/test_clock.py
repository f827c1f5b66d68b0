"""Wrong clocks: what they make of a log is undone or left out, and nothing is found because of them."""

import json
import os
import random
import zlib
from datetime import datetime, timedelta

import pytest

from tests.profiling.made_logs import Lines, Made, make_run, read_run
from verl_mux.profiling.report.input import clock, run_log
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


def same_but_for_the_gap(summary, before):
    """Shifted lines lack the time between the last line before the jump and the first after it."""
    assert summary["findings"] == []
    assert summary["requests"] == before["requests"]
    assert summary["event_share"] == before["event_share"]
    for figure in ("total", "p50", "t80_over_total"):
        assert summary["completion"][figure] == pytest.approx(before["completion"][figure], rel=0.03)


@pytest.mark.parametrize("seconds", [-3600.0, -120.0, -10.0])
def test_a_clock_set_back_for_good_is_shifted(healthy, seconds):
    before = report(healthy)
    summary = changed(healthy, lambda lines: moved(lines, len(lines) // 2, None, seconds))
    assert summary["input"]["noticed"] == {clock.SHIFTED: 1}
    where, line, told = summary["input"]["examples"][clock.SHIFTED].split(", ")
    assert where.endswith(os.path.join(*PLACE)) and line.startswith("line ")
    assert float(told.removesuffix(" s")) == pytest.approx(-seconds, abs=2.0)
    assert summary["skipped_lines"] == 0
    same_but_for_the_gap(summary, before)


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_a_clock_set_wrong_for_a_while_is_shifted_for_that_while(healthy, seconds):
    before = report(healthy)
    summary = changed(healthy, lambda lines: moved(lines, len(lines) // 3, len(lines) // 2, seconds))
    assert summary["input"]["noticed"] == {clock.SHIFTED: 1}
    same_but_for_the_gap(summary, before)


def test_two_jumps_are_both_shifted(healthy):
    before = report(healthy)
    summary = changed(healthy, lambda lines: moved(moved(lines, len(lines) // 3, None, -600), len(lines) // 2, None, -600))
    assert summary["input"]["noticed"] == {clock.SHIFTED: 2}
    same_but_for_the_gap(summary, before)


@pytest.mark.parametrize(("seconds", "count"), [(-2400.0, 1), (-2400.0, 3), (2400.0, 1), (2400.0, 3), (-60.0, 1)])
def test_stray_lines_are_skipped(healthy, seconds, count):
    before = report(healthy)
    summary = changed(healthy, lambda lines: moved(lines, 12, 12 + count, seconds))
    assert summary["input"]["skipped"] == {clock.STRAY: count}
    assert summary["input"]["examples"][clock.STRAY].endswith(os.path.join(*PLACE) + ", line 13")
    assert summary["findings"] == []
    assert before["requests"] - summary["requests"] in range(count + 1)


@pytest.mark.parametrize("zone", ["Z", "+08:00", "-07:00"])
def test_a_line_in_another_zone_is_skipped_unless_it_agrees(healthy, zone):
    def with_zone(lines):
        lines[12]["timestamp"] = "2025-08-11T19:19:45" + zone
        lines[20]["timestamp"] += "Z"
        return lines

    summary = changed(healthy, with_zone)
    assert summary["input"]["skipped"] == {clock.ZONE: 1}
    assert summary["input"]["examples"][clock.ZONE].endswith("line 13")
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
    "the first lines twice": lambda lines: lines + lines[:30],
}


@pytest.mark.parametrize("order", ORDERS)
def test_lines_in_another_order_keep_their_times(healthy, order):
    before = report(healthy)
    summary = changed(healthy, ORDERS[order])
    assert (summary["skipped_lines"], set(summary["input"]["noticed"]) - {clock.BELIEVED}) == (0, set())
    assert summary["completion"] == before["completion"]
    assert summary["findings"] == []


def test_a_file_is_judged_as_a_whole_however_many_lines_are_read_at_once(healthy, monkeypatch):
    monkeypatch.setattr(run_log, "PIECE_LINES", 10)
    monkeypatch.setattr("verl_mux.profiling.report.input.run_log.MAX_LINE_BYTES", 2000)
    summary = changed(healthy, lambda lines: moved(lines, len(lines) // 2, None, -3600))
    assert (summary["input"]["noticed"], summary["findings"]) == ({clock.SHIFTED: 1}, [])


def test_a_file_too_large_to_be_read_whole_keeps_its_times(healthy, monkeypatch):
    monkeypatch.setattr(clock, "WHOLE_BYTES", 100)
    summary = changed(healthy, lambda lines: moved(lines, len(lines) // 2, None, -3600))
    assert summary["input"]["noticed"] == {clock.BELIEVED: 1}


def test_other_roles_keep_their_times_for_those_are_compared_across_files(healthy):
    def of_a_server(lines):
        return [line | {"role": "server"} for line in moved(lines, len(lines) // 2, None, -3600)]

    noticed = changed(healthy, of_a_server)["input"]["noticed"]
    assert (noticed[clock.BELIEVED], clock.SHIFTED in noticed) == (1, False)


def test_a_line_written_a_little_late_is_no_wrong_clock(tmp_path):
    lines = Lines(worker=0, step=1)
    for number in range(8):
        lines.add(10.0 + number / 2, "request_start", extra={"request_id": str(number)})
    lines.add(10.0, "preprocessing_duration", 10.0)  # from a thread that had to wait; it began before all the others
    for number in range(8):
        lines.add(20.0 + number, "async_rollout_request_complete", 10.0 + number / 2, {"request_id": str(number)})
    lines.write(tmp_path, order=False)
    summary = report(tmp_path)
    assert (summary["skipped_lines"], summary["input"]["noticed"]) == (0, {clock.BELIEVED: 1})
    assert summary["completion"]["total"] == pytest.approx(17.0, abs=0.6)
