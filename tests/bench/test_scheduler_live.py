"""The live bench of decisions where its coordinator is gone."""

import multiprocessing
import threading

import pytest

from bench import scheduler_live
from verl_mux.errors import Failure


def waits_for_ever(address, bench):
    bench.send("begun")
    threading.Event().wait()


def test_the_processes_that_hand_a_node_over_end_with_the_bench(monkeypatch):
    monkeypatch.setattr(scheduler_live, "_hand_over", waits_for_ever)
    with pytest.raises(Failure, match="gone"), scheduler_live._grants("tcp://127.0.0.1:1"):
        raise Failure("the coordinator is gone")
    assert multiprocessing.active_children() == []


def test_a_word_that_never_comes_is_a_failure(monkeypatch):
    monkeypatch.setattr(scheduler_live, "_hand_over", waits_for_ever)
    with pytest.raises(Failure, match="have said nothing"), scheduler_live._grants("tcp://127.0.0.1:1"):
        monkeypatch.setattr(scheduler_live, "_ANSWER_MS", 10)
    assert multiprocessing.active_children() == []
