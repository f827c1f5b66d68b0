"""The queue and its thread: bounded in memory and on disk, and never in the caller's way."""

import json
import os

from verl_mux.profiling.eventlog import line_writer
from verl_mux.profiling.eventlog.line_writer import LineFiles, LineWriter
from verl_mux.profiling.eventlog.log import EventLog


class Owner:
    """A log as the writer sees it."""

    def __init__(self, directory, max_bytes=10**9, max_total_bytes=10**9):
        self.files, self.step = LineFiles(directory, 0, max_bytes, max_total_bytes), 1

    def refusal_line(self, count):
        return json.dumps({"dropped": count}).encode() + b"\n"

    def cost_line(self, step, lines, caller, thread):
        return json.dumps({"step": step, "lines": lines, "caller": caller, "thread": thread}).encode() + b"\n"


def texts(directory):
    return {path.relative_to(directory).as_posix(): path.read_text() for path in sorted(directory.rglob("*.jsonl"))}


def test_lines_of_one_file_keep_their_order(tmp_path):
    writer, owner = LineWriter(), Owner(tmp_path)
    for number in range(2000):
        writer.put(owner, number % 3, b"%d\n" % number)
    assert writer.flush(10.0)
    for step, text in enumerate(texts(tmp_path).values()):
        assert [int(line) for line in text.split()] == list(range(step, 2000, 3))


def test_two_logs_of_one_process_share_a_file(tmp_path):
    writer, first, second = LineWriter(), Owner(tmp_path), Owner(tmp_path)
    for number, owner in enumerate((first, second, first)):
        writer.put(owner, 1, b"%d\n" % number)
        assert writer.flush(5.0)
    assert texts(tmp_path) == {"step_1/worker_0.jsonl": "0\n1\n2\n"}


def test_a_full_queue_refuses_counts_and_tells(tmp_path, monkeypatch):
    writer, owner = LineWriter(max_lines=3), Owner(tmp_path)
    monkeypatch.setattr(writer, "_start", lambda: None)  # nobody drains yet
    for number in range(10):
        writer.put(owner, 1, b"%d\n" % number)
    assert sum(writer.refused.values()) == 7
    monkeypatch.undo()
    assert writer.flush(10.0)
    assert writer.flush(10.0)  # the refusals are told after the lines
    assert texts(tmp_path)["step_1/worker_0.jsonl"].split("\n")[:4] == ["0", "1", "2", '{"dropped": 7}']


def test_a_full_file_gets_a_number_and_a_new_one_begins(tmp_path):
    writer, owner = LineWriter(), Owner(tmp_path, max_bytes=100)
    for number in range(5):
        writer.put(owner, 1, b"%d" % number * 60 + b"\n")
        assert writer.flush(10.0)
    names = sorted(texts(tmp_path))
    assert names == ["step_1/worker_0.1.jsonl", "step_1/worker_0.2.jsonl", "step_1/worker_0.3.jsonl",
                     "step_1/worker_0.4.jsonl", "step_1/worker_0.jsonl"]  # fmt: skip


def test_the_oldest_files_go_when_the_total_is_reached(tmp_path):
    writer, owner = LineWriter(), Owner(tmp_path, max_total_bytes=250)
    for step in range(6):
        writer.put(owner, step, b"x" * 99 + b"\n")
        assert writer.flush(10.0)
    assert sorted(texts(tmp_path)) == [f"step_{step}/worker_0.jsonl" for step in (3, 4, 5)]


def test_files_of_others_are_never_removed(tmp_path):
    other = tmp_path / "step_0" / "worker_9.jsonl"
    other.parent.mkdir()
    other.write_text("x" * 1000)
    writer, owner = LineWriter(), Owner(tmp_path, max_total_bytes=10)
    for step in range(3):
        writer.put(owner, step, b"y" * 50 + b"\n")
        assert writer.flush(10.0)
    assert other.exists()


def test_a_directory_that_cannot_be_written_costs_lines_and_nothing_else(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    writer, owner = LineWriter(), Owner(blocked)
    writer.put(owner, 1, b"x\n")
    assert writer.flush(10.0)
    assert writer.failed == 1
    fine = Owner(tmp_path / "fine")
    writer.put(fine, 1, b"y\n")
    assert writer.flush(10.0)
    assert texts(tmp_path / "fine")["step_1/worker_0.jsonl"] == "y\n"


def test_many_steps_do_not_keep_many_files_open(tmp_path):
    writer, owner = LineWriter(), Owner(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for step in range(100):
        writer.put(owner, step, b"x\n")
    assert writer.flush(10.0)
    assert len(os.listdir("/proc/self/fd")) < before + 20
    assert len(texts(tmp_path)) == 100


def test_a_closed_log_opens_its_files_again(tmp_path):
    log = EventLog(tmp_path)
    log.log("a")
    log.close()
    log.log("b")
    log.close()
    (text,) = texts(tmp_path).values()
    assert [json.loads(line)["event"] for line in text.splitlines()] == ["log_open", "a", "b"]


def test_where_asked_for_it_tells_what_it_took_and_once_only(tmp_path, monkeypatch):
    monkeypatch.setenv(line_writer.COST_VARIABLE, "1")
    monkeypatch.setattr(line_writer, "COST_SECONDS", 0.0)
    writer, owner = LineWriter(), Owner(tmp_path)
    told = []
    for step in (1, 2):
        writer.put(owner, step, b"{}\n")
        writer.put(owner, step, b"{}\n")
        writer.caller_seconds += step
        assert writer.flush(10.0) and writer.flush(10.0)  # told after the lines
        told += [json.loads(line) for line in texts(tmp_path)[f"step_{step}/worker_0.jsonl"].splitlines()[2:]]
    assert [(line["step"], line["lines"], line["caller"]) for line in told] == [(1, 2, 1.0), (2, 2, 2.0)]
    assert all(0 < line["thread"] < 5 for line in told)
