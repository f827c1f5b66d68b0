"""What an engine's processes and the processes beside them leave for each other in the server's directory."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from verl_mux.rollout.engine.server_directory import (
    DIRECTORY_VARIABLE,
    forget,
    leave_word,
    mapped_bytes,
    open_gate,
    wait_at_gate,
    wait_until_engine_is_at_gate,
    word_left,
    write_mapped,
)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def test_where_no_server_asks_there_is_no_gate_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    wait_at_gate()
    write_mapped({"weights": 10}, pid=1)
    leave_word("unread")
    assert not list(tmp_path.iterdir())


def _engine(done) -> None:
    wait_at_gate()
    done.set()


@pytest.mark.parametrize("schedulers", [1, 2])
def test_engines_map_memory_only_after_the_gate_opens(directory, schedulers):
    context = multiprocessing.get_context("fork")
    done = [context.Event() for _ in range(schedulers)]
    engines = [context.Process(target=_engine, args=(event,)) for event in done]
    for engine in engines:
        engine.start()
    wait_until_engine_is_at_gate(directory)
    assert not any(event.is_set() for event in done)
    open_gate(directory)
    for engine in engines:
        engine.join(30)
    assert all(event.is_set() for event in done) and [engine.exitcode for engine in engines] == [0] * schedulers
    open_gate(directory)
    wait_at_gate()  # an open gate stays open
    wait_until_engine_is_at_gate(directory)


def test_an_engine_that_cannot_start_leaves_its_word(directory):
    assert word_left(directory) is None
    leave_word("no room")
    leave_word("another rank, later")
    assert word_left(directory) == "no room"


def test_a_process_replaces_its_own_report_and_no_other(directory):
    assert mapped_bytes(directory) == {}
    write_mapped({"weights": 3 << 40}, pid=1)
    assert mapped_bytes(directory) == {"weights": 3 << 40}
    write_mapped({"weights": 5, "kv_cache": 1}, pid=os.getpid())
    write_mapped({"weights": 0}, pid=1)
    assert mapped_bytes(directory) == {"weights": 5, "kv_cache": 1}


def test_a_process_that_was_killed_has_nothing_on_the_device_before_its_parent_looks_and_after(directory):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_mapped({"weights": 7}, process.pid)
    assert mapped_bytes(directory) == {"weights": 7}
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert mapped_bytes(directory) == {}
    process.communicate()
    assert mapped_bytes(directory) == {}


def test_the_last_server_of_a_run_that_ends_on_a_host_leaves_nothing_there(tmp_path):
    first, last = tmp_path / "run" / "server_0_0", tmp_path / "run" / "server_1_0"
    for directory in (first, last):
        directory.mkdir(parents=True)
        open_gate(directory)
    forget(first)
    assert list((tmp_path / "run").iterdir()) == [last] and list(last.iterdir())
    forget(last)
    assert list(tmp_path.iterdir()) == []


def _write_many(pid: int) -> None:
    for count in range(200):
        write_mapped({"weights": count}, pid=pid)


def test_a_reader_never_sees_half_a_report(directory):
    writer = multiprocessing.get_context("fork").Process(target=_write_many, args=(os.getpid(),))
    writer.start()
    while writer.is_alive():
        assert mapped_bytes(directory).get("weights", 0) < 200
    writer.join()
    assert mapped_bytes(directory) == {"weights": 199}
