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

from verl_mux.profiling.eventlog.log import MAX_LINE_BYTES, NULL_LOG, EventLog


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
    def __repr__(self):
        raise RuntimeError("no")


ODD = [{"x": Unprintable()}, {"x": float("nan")}, {"x": {1, 2}}, {1: 2}, {"x": b"\xff"}, {"x": 2**70}]


@pytest.mark.parametrize("extra", ODD)
def test_whatever_extra_holds_the_caller_is_not_stopped(tmp_path, extra):
    log = EventLog(tmp_path)
    log.log("odd", extra=extra)
    log.log("fine")
    log.close()
    assert read(tmp_path)[-1]["event"] == "fine"


def test_a_tensor_is_named_and_not_read(tmp_path):
    class Tensor:  # as on a device: reading it would wait
        def item(self):
            raise AssertionError("read")

        def __repr__(self):
            raise AssertionError("printed")

    log = EventLog(tmp_path)
    log.log("a", extra={"loss": Tensor()})
    log.close()
    assert read(tmp_path)[0]["extra"] == {"loss": "<Tensor>"}


def test_numpy_numbers_are_numbers(tmp_path):
    log = EventLog(tmp_path)
    log.log("a", extra={"loss": numpy.float32(0.5), "n": numpy.int64(3)})
    log.close()
    assert read(tmp_path)[0]["extra"] == {"loss": 0.5, "n": 3}


def test_extra_is_taken_as_it_is_at_the_call(tmp_path):
    log, extra = EventLog(tmp_path), {"turn": 1}
    log.log("a", extra=extra)
    extra["turn"] = 2
    log.close()
    assert read(tmp_path)[0]["extra"] == {"turn": 1}


def test_an_enormous_extra_is_replaced_by_its_size(tmp_path):
    log = EventLog(tmp_path)
    log.log("a", extra={"text": "x" * (2 * MAX_LINE_BYTES)})
    log.close()
    assert read(tmp_path)[0]["extra"]["truncated_bytes"] > MAX_LINE_BYTES


def test_threads_and_tasks_lose_nothing(tmp_path):
    log = EventLog(tmp_path)
    threads = [threading.Thread(target=lambda n=n: [log.log("a", extra={"n": n, "i": i}) for i in range(500)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    told = {(line["extra"]["n"], line["extra"]["i"]) for line in read(tmp_path)}
    assert len(told) == 8 * 500


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
    log = EventLog(tmp_path, worker=1, role="rollout", job="a")
    process = multiprocessing.get_context("spawn").Process(target=_log_from_a_spawned_process, args=(log,))
    process.start()
    process.join()
    (line,) = read(tmp_path)
    assert (line["event"], line["workid"], line["role"], line["job"]) == ("spawned", 1, "rollout", "a")


def test_a_pickled_log_keeps_its_step(tmp_path):
    log = EventLog(tmp_path, step=3)
    assert pickle.loads(pickle.dumps(log)).step == 3


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
    steps = [
        line["step"] for path in tmp_path.rglob("*.jsonl") for line in map(json.loads, path.open()) if line["event"] == "step"
    ]
    assert sorted(steps) == [2, 4]
