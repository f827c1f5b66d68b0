import multiprocessing

import pytest

from verl_mux.memory.tag_report import DIRECTORY_VARIABLE
from verl_mux.rollout.engine.launch_gate import leave_word, open_gate, wait_at_gate, wait_until_engine_is_at_gate, word_left


def test_without_a_directory_there_is_no_gate(monkeypatch):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    wait_at_gate("whatever", load_model="is called with")


def _engine(done) -> None:
    wait_at_gate()
    done.set()


@pytest.mark.parametrize("schedulers", [1, 2])
def test_engines_map_memory_only_after_the_gate_opens(tmp_path, monkeypatch, schedulers):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    context = multiprocessing.get_context("fork")
    done = [context.Event() for _ in range(schedulers)]
    engines = [context.Process(target=_engine, args=(event,)) for event in done]
    for engine in engines:
        engine.start()
    wait_until_engine_is_at_gate(tmp_path)
    assert not any(event.is_set() for event in done)
    open_gate(tmp_path)
    for engine in engines:
        engine.join(30)
    assert all(event.is_set() for event in done) and [engine.exitcode for engine in engines] == [0] * schedulers


def test_an_open_gate_stays_open(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    open_gate(tmp_path)
    open_gate(tmp_path)
    wait_at_gate()
    wait_until_engine_is_at_gate(tmp_path)


def test_an_engine_that_cannot_start_leaves_its_word(tmp_path, monkeypatch):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    leave_word("to nobody")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    assert word_left(tmp_path) is None
    leave_word("no room")
    leave_word("another rank, later")
    assert word_left(tmp_path) == "no room"
