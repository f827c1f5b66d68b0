"""The log's lines: their format, and that nothing a caller hands over stops it."""

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from datetime import datetime

import numpy
import pytest

from tests.full_disk import no_room_beyond
from verl_mux.profiling.eventlog import log as log_module
from verl_mux.profiling.eventlog.log import MAX_LINE_BYTES, NULL_LOG, EventLog, LineFiles, LineWriter


def read(directory, own=True):
    """All lines under a directory, those about the log itself left out."""
    lines = [json.loads(line) for path in sorted(directory.rglob("*.jsonl")) for line in path.read_text().splitlines()]
    return [line for line in lines if own is False or not line["event"].startswith("log_")]


def test_a_line_has_the_seed_formats_keys_in_its_order(tmp_path):
    log = EventLog(tmp_path, worker=2, role="rollout", job="a", step=4)
    log.log("sync", 1.5, {"bytes": 3})
    log.close()
    (line,) = read(tmp_path)
    assert list(line) == ["timestamp", "event", "duration_sec", "extra", "workid", "step", "role", "job"]
    assert (line["workid"], line["step"], line["duration_sec"], line["extra"]) == (2, 4, 1.5, {"bytes": 3})
    datetime.fromisoformat(line["timestamp"])


def test_files_lie_by_role_step_and_worker(tmp_path):
    log = EventLog(tmp_path, worker=3, role="server")
    log.log("a", step=7)
    log.step = 8
    log.log("b")
    log.close()
    found = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.jsonl"))]
    assert found == [f"server/step_{step}/worker_3.jsonl" for step in (0, 7, 8)]  # step 0: the process says who it is


def test_the_time_stamp_may_be_given_as_epoch_seconds_or_local_time(tmp_path):
    log = EventLog(tmp_path)
    when = datetime(2025, 8, 11, 23, 19, 45, 1830)
    log.log("a", timestamp=when)
    log.log("b", timestamp=when.timestamp())
    log.close()
    assert [line["timestamp"] for line in read(tmp_path)] == ["2025-08-11T23:19:45.001830"] * 2


def test_a_span_logs_its_duration_and_what_the_block_added(tmp_path):
    log = EventLog(tmp_path)
    with log.span("sync", extra={"version": 1}) as span:
        span.extra["bytes"] = 7
    log.close()
    (line,) = read(tmp_path)
    assert line["extra"] == {"version": 1, "bytes": 7}
    assert line["duration_sec"] >= 0


def test_a_span_that_fails_is_logged_with_its_error_and_the_error_passes(tmp_path):
    log = EventLog(tmp_path)
    with pytest.raises(ZeroDivisionError), log.span("reward"):
        _ = 1 / 0
    log.close()
    assert read(tmp_path)[0]["extra"]["error"] == "ZeroDivisionError: division by zero"


def test_a_cancelled_span_is_logged_too(tmp_path):
    log = EventLog(tmp_path)

    async def cancelled():
        with log.span("turn_engine_call"):
            await asyncio.get_running_loop().create_future()

    async def main():
        task = asyncio.ensure_future(cancelled())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    log.close()
    assert "CancelledError" in read(tmp_path)[0]["extra"]["error"]


def test_the_span_belongs_to_the_step_it_began_in(tmp_path):
    log = EventLog(tmp_path, step=1)
    with log.span("generate"):
        log.step = 2
    log.close()
    assert read(tmp_path)[0]["step"] == 1


class Unprintable:
    """As a tensor on a device: reading it would wait."""

    def item(self):
        raise AssertionError("read")

    def __repr__(self):
        raise RuntimeError("no")


# What a caller hands over -> what is logged; None: the line may be lost, the caller is not stopped.
EXTRA = {
    "an object, which is named and not read": ({"loss": Unprintable()}, {"loss": "<Unprintable>"}),
    "numpy's numbers": ({"loss": numpy.float32(0.5), "n": numpy.int64(3)}, {"loss": 0.5, "n": 3}),
    "what is too long": ({"text": "x" * (2 * MAX_LINE_BYTES)}, {"truncated_bytes": 131185}),
    **{
        f"odd {n}": (odd, None)
        for n, odd in enumerate([{"x": float("nan")}, {"x": {1, 2}}, {1: 2}, {"x": b"\xff"}, {"x": 2**70}])
    },
}


@pytest.mark.parametrize("name", EXTRA)
def test_whatever_extra_holds_the_caller_is_not_stopped(tmp_path, name):
    extra, logged = EXTRA[name]
    log = EventLog(tmp_path)
    log.log("odd", extra=extra)
    extra.clear()  # it is taken as it is at the call
    log.log("fine")
    log.close()
    *lines, fine = read(tmp_path)
    assert fine["event"] == "fine" and (logged is None or [line["extra"] for line in lines] == [logged])


def test_threads_and_tasks_lose_nothing(tmp_path):
    log = EventLog(tmp_path)
    threads = [threading.Thread(target=lambda n=n: [log.log("a", extra={"n": n, "i": i}) for i in range(500)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    logged = {(line["extra"]["n"], line["extra"]["i"]) for line in read(tmp_path)}
    assert len(logged) == 8 * 500


def test_each_process_says_who_it_is_once(tmp_path):
    log = EventLog(tmp_path)
    log.log("a", step=1)
    log.log("b", step=2)
    log.close()
    opened = [line for line in read(tmp_path, own=False) if line["event"] == "log_open"]
    assert [line["extra"]["pid"] for line in opened] == [os.getpid()]


def test_a_forked_child_writes_its_own_lines_and_none_of_its_parents(tmp_path):
    log = EventLog(tmp_path)
    log.log("parent")
    pid = os.fork()
    if pid == 0:
        log.log("child")
        log.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    log.close()
    assert sorted(line["event"] for line in read(tmp_path)) == ["child", "parent"]


def _log_from_a_spawned_process(log):
    log.log("spawned", step=5)
    log.close()


def test_a_log_travels_to_a_spawned_process(tmp_path):
    log = EventLog(tmp_path, worker=1, role="rollout", job="a", step=3)
    assert pickle.loads(pickle.dumps(log)).step == 3
    process = multiprocessing.get_context("spawn").Process(target=_log_from_a_spawned_process, args=(log,))
    process.start()
    process.join()
    (line,) = read(tmp_path)
    assert (line["event"], line["workid"], line["role"], line["job"]) == ("spawned", 1, "rollout", "a")


KILLED = """
import sys, os, signal
from verl_mux.profiling.eventlog.log import EventLog
log = EventLog(sys.argv[1])
for i in range(200):
    log.log("a", extra={"i": i})
log.flush()
print("ready", flush=True)
while True:
    log.log("b", extra={"text": "x" * 1000})
"""


def test_after_kill_9_at_most_the_last_line_is_torn(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    (path,) = tmp_path.rglob("*.jsonl")
    *whole, last = path.read_bytes().split(b"\n")
    lines = [json.loads(line) for line in whole]
    assert [line["extra"]["i"] for line in lines if line["event"] == "a"] == list(range(200))
    with pytest.raises(ValueError):
        json.loads(last or b"torn")


def test_a_line_after_a_torn_one_begins_anew(tmp_path):
    path = tmp_path / "trainer" / "step_0" / "worker_0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"timestamp": "2025-08')
    log = EventLog(tmp_path)
    log.log("a")
    log.close()
    torn, *rest = path.read_text().splitlines()
    assert torn == '{"timestamp": "2025-08'
    assert [json.loads(line)["event"] for line in rest] == ["log_open", "a"]


def test_the_null_log_does_nothing_and_looks_alike():
    with NULL_LOG.span("sync", extra={"a": 1}) as span:
        span.extra["bytes"] = 3
    NULL_LOG.step = 4
    NULL_LOG.log("a", 1.0, {"b": 2}, step=3, timestamp=0.0)
    assert NULL_LOG.flush() is True
    NULL_LOG.close()
    names = {name for name in dir(EventLog) if not name.startswith("_")} - {"refusal_line", "cost_line"}
    assert names <= set(dir(NULL_LOG))


def test_only_every_second_step_is_logged_if_asked_so(tmp_path):
    log = pickle.loads(pickle.dumps(EventLog(tmp_path, role="trainer", every=2)))
    for step in (1, 2, 3, 4):
        log.log("step", 1.0, step=step)
    log.flush()
    assert sorted(line["step"] for line in read(tmp_path)) == [2, 4]


# The writer: its queue and its thread, bounded in memory and on disk, and never in the caller's way.
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
    monkeypatch.setattr(writer, "_start", lambda: None)  # no thread drains yet
    for number in range(10):
        writer.put(owner, 1, b"%d\n" % number)
    assert sum(writer.refused.values()) == 7
    monkeypatch.undo()
    assert writer.flush(10.0)
    assert writer.flush(10.0)  # the refusals are logged after the lines
    assert texts(tmp_path)["step_1/worker_0.jsonl"].split("\n")[:4] == ["0", "1", "2", '{"dropped": 7}']


def test_a_full_file_gets_a_number_and_a_new_one_begins(tmp_path):
    writer, owner = LineWriter(), Owner(tmp_path, max_bytes=100)
    for number in range(5):
        writer.put(owner, 1, b"%d" % number * 60 + b"\n")
        assert writer.flush(10.0)
    names = sorted(texts(tmp_path))
    assert names == ["step_1/worker_0.1.jsonl", "step_1/worker_0.2.jsonl", "step_1/worker_0.3.jsonl",
                     "step_1/worker_0.4.jsonl", "step_1/worker_0.jsonl"]  # fmt: skip


def test_the_oldest_files_go_when_the_total_is_reached_and_none_of_others(tmp_path):
    other = tmp_path / "step_0" / "worker_9.jsonl"
    other.parent.mkdir()
    other.write_text("x" * 1000)
    writer, owner = LineWriter(), Owner(tmp_path, max_total_bytes=250)
    for step in range(6):
        writer.put(owner, step, b"x" * 99 + b"\n")
        assert writer.flush(10.0)
    assert sorted(texts(tmp_path)) == ["step_0/worker_9.jsonl", *(f"step_{step}/worker_0.jsonl" for step in (3, 4, 5))]


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


def test_on_a_disk_that_was_full_for_a_while_every_line_is_there_or_counted_and_each_time_is_said_once(tmp_path, caplog):
    writer, owner = LineWriter(), Owner(tmp_path)

    def put(numbers):
        for number in numbers:
            writer.put(owner, 1, b"%04d\n" % number)
        assert writer.flush(10.0)

    put(range(100))
    for first in (100, 300):
        with no_room_beyond(len(texts(tmp_path)["step_1/worker_0.jsonl"]) + 12):  # two lines and a torn one
            put(range(first, first + 50))
            put(range(first + 50, first + 100))
            assert writer.flush(10.0)
        put(range(first + 100, first + 200))
    assert writer.flush(10.0)
    lines = texts(tmp_path)["step_1/worker_0.jsonl"].splitlines()
    whole = {int(line) for line in lines if len(line) == 4}
    dropped = [json.loads(line)["dropped"] for line in lines if line.startswith("{") and line.endswith("}")]
    assert len(whole) + sum(dropped) == 500 and writer.failed == sum(dropped) > 190
    assert whole > {*range(100), *range(200, 300), *range(400, 500)}
    assert caplog.text.count("cannot write") == 2


def deep(levels):
    value = 1
    for _ in range(levels):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    "hostile", ["half \ud83d of a character", {"\udc80": ["\ud800"]}, deep(1200)], ids=["text", "key", "deep"]
)
def test_what_is_no_json_is_replaced_and_not_lost(tmp_path, hostile):
    log = EventLog(tmp_path)
    log.log("tool_execution", 1.0, {"request_id": "a", "tool": hostile})
    log.close()
    (line,) = read(tmp_path)
    assert line["event"] == "tool_execution" and line["extra"]["request_id"] == "a"
    assert "?" in json.dumps(line["extra"]["tool"]) or "<dict>" in json.dumps(line["extra"]["tool"])


def test_what_cannot_be_written_at_all_is_said_and_does_not_hide_a_disk_error(tmp_path, caplog):
    class Hostile(dict):
        def items(self):
            raise ValueError("no items")

    log, writer = EventLog(tmp_path), log_module.writer()
    failed = writer.failed
    log.log("sync", 1.0, Hostile(a="\ud800"))
    log.close()
    (dropped,) = [line for line in read(tmp_path, own=False) if line["event"] == "log_dropped"]
    assert dropped["extra"] == {"count": 1} and writer.failed == failed
    writer, owner = LineWriter(), Owner(tmp_path / "trainer" / "step_0" / "worker_0.jsonl")
    writer.put(owner, 1, b"x\n")
    assert writer.flush(10.0)
    assert "cannot write" in caplog.text


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
    monkeypatch.setenv(log_module.COST_VARIABLE, "1")
    monkeypatch.setattr(log_module, "COST_SECONDS", 0.0)
    writer, owner = LineWriter(), Owner(tmp_path)
    logged = []
    for step in (1, 2):
        writer.put(owner, step, b"{}\n")
        writer.put(owner, step, b"{}\n")
        writer.caller_seconds += step
        assert writer.flush(10.0) and writer.flush(10.0)  # the threads' lines come after the others
        logged += [json.loads(line) for line in texts(tmp_path)[f"step_{step}/worker_0.jsonl"].splitlines()[2:]]
    assert [(line["step"], line["lines"], line["caller"]) for line in logged] == [(1, 2, 1.0), (2, 2, 2.0)]
    assert all(0 < line["thread"] < 5 for line in logged)
